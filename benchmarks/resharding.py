"""How often `reshard` names exactly the collectives that XLA compiles: all pairs of layouts of one to three dims.

python benchmarks/resharding.py            # everything, about ten minutes on two cores
python benchmarks/resharding.py --every 20 # each twentieth pair
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "mesh"))
from test_resharding import MESHES, SHAPES, layouts, observed  # noqa: E402  (needs the path above)

from autoshard.mesh.resharding import reshard  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="compile each N-th pair only")
    every = parser.parse_args().every
    print(f"jax {jax.__version__}\n{'mesh':<28}{'dims':>5}{'pairs':>8}{'equal':>8}{'share':>8}{'seconds':>9}")
    different = []
    for mesh_shape, (ndim, shape) in itertools.product(MESHES, SHAPES.items()):
        start = time.perf_counter()
        pairs = list(itertools.permutations(layouts(mesh_shape, ndim), 2))[::every]
        wrong = []
        for source, target in pairs:
            predicted, real = reshard(shape, 4, source, target, mesh_shape), observed(mesh_shape, shape, source, target)
            if predicted != real:
                wrong.append((mesh_shape, source, target, predicted, real))
        different += wrong
        equal = len(pairs) - len(wrong)
        took = time.perf_counter() - start
        print(f"{mesh_shape!s:<28}{ndim:>5}{len(pairs):>8}{equal:>8}{equal / len(pairs):>8.1%}{took:>9.1f}", flush=True)
    for mesh_shape, source, target, predicted, real in different:
        print(f"{mesh_shape}: {source} -> {target}\n  predicted {predicted}\n  XLA       {real}")


if __name__ == "__main__":
    main()
