"""Optimizers train under a plan as on one device: a sample of those that `benchmarks/optimizers.py` goes through."""

import inspect
import sys
from pathlib import Path

import optax
import optax.contrib
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import optimizers  # a script of benchmarks/
from optimizers import OPTIMIZERS, Sizes, row_of

SMALL = Sizes(layers=1, width=16, hidden=32, batch=16)


@pytest.mark.parametrize("name", ["muon", "adafactor, small", "MultiSteps"])
def test_trains_as_on_one_device(name):
    row = row_of(name, SMALL, compares=False)
    assert row.gap < 0.05 and row.off < 1e-4
    assert len(str(row).split(" | ")) == len(optimizers.COLUMNS)


def test_a_loss_that_differs_is_seen(monkeypatch):
    monkeypatch.setattr(optimizers, "RTOL", -1.0)
    with pytest.raises(AssertionError, match="losses differ"):
        row_of("sgd", SMALL, compares=False)


def test_every_optimizer_of_optax_is_gone_through():
    """Functions of optax.contrib that make no transformation by themselves, or part of one, are listed here."""
    parts = {name for name in dir(optax.contrib) if name.startswith("scale_by_") or name[0] == "_" or name[0].isupper()}
    others = {"differentially_private_aggregate", "hutchinson_estimator_diag_hessian", "schedule_free_eval_params"}
    others |= {"split_real_and_imaginary"}  # of complex weights
    assert not set(dir(optax.contrib)) - parts - others - OPTIMIZERS.keys()
    made = {name for name in dir(optax) if "GradientTransformation" in str(_returned(getattr(optax, name)))}
    parts = {name for name in made if name.startswith(("scale", "clip", "_deprecated"))}
    others = {"add_decayed_weights", "chain", "freeze", "identity", "multi_transform", "named_chain", "set_to_zero"}
    others |= {"conditionally_mask", "inject_stateful_hyperparams", "measure_with_ema", "normalize_by_update_norm"}
    others |= {"snapshot", "stateless", "stateless_with_tree_map", "trace", "with_extra_args_support"}
    assert not made - parts - others - OPTIMIZERS.keys()


def _returned(function):
    return inspect.signature(function).return_annotation if inspect.isfunction(function) else None
