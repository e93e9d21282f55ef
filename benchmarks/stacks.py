"""Train steps of plain layers, one after the other: dense ones, and a ResNet-18. They are planned, and never run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from workloads import Abstract


def stack(depth: int, width: int, residual: bool, batch: int = 64) -> Abstract:
    """A few dense layers."""

    def step(params, batch):
        def loss(params):
            y = batch
            for w in params:
                y = jax.nn.relu(y @ w) + (y if residual else 0)
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], value

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return Abstract(step, [f32(width, width)] * depth, f32(batch, width))


def resnet_18() -> Abstract:
    """The ResNet of two 3 x 3 convolutions per block (He et al. 2015), SGD with momentum."""

    def normalized(features, kernel, stride, x):
        x = nn.Conv(features, (kernel, kernel), (stride, stride), use_bias=False)(x)
        return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.max_pool(nn.relu(normalized(64, 7, 2, x)), (3, 3), strides=(2, 2), padding="SAME")
            for stage, features in enumerate((64, 128, 256, 512)):
                for block in range(2):
                    stride = 2 if stage and not block else 1
                    y = normalized(features, 3, 1, nn.relu(normalized(features, 3, stride, x)))
                    x = nn.relu(y + (x if x.shape == y.shape else normalized(features, 1, stride, x)))
            return nn.Dense(1000)(x.mean((1, 2)))

    model, optimizer = ResNet(), optax.sgd(0.1, momentum=0.9)

    def step(state, batch):
        params, statistics, moments = state

        def loss(params):
            variables = {"params": params, "batch_stats": statistics}
            logits, new = model.apply(variables, batch["images"], mutable="batch_stats")
            labels = batch["labels"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new["batch_stats"]

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), new, moments), value

    images = jax.ShapeDtypeStruct((128, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    params = variables["params"]
    state = params, variables["batch_stats"], jax.eval_shape(optimizer.init, params)
    return Abstract(step, state, {"images": images, "labels": jax.ShapeDtypeStruct((128,), jnp.int32)})


STACKS = {
    f"{depth} x {width}" + ", residual" * residual: lambda sizes=(depth, width, residual): stack(*sizes)
    for depth, width, residual in ((4, 1024, False), (6, 1024, True), (12, 1024, True), (24, 1024, True))
} | {"resnet-18": resnet_18}
