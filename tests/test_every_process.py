"""Plans, fingerprints, keys of caches and texts of values are the same in every process, whatever Python's hashes are.

This process and one other make all of them, since a process takes longer to start than to make one of them.
"""

import json
import os
import subprocess
import sys

import compilation
import pytest
import test_cache
from oracles import SMALL, mesh_of, slow_chips

import autoshard
from autoshard.program import trace
from autoshard.program.signature import text_of_value

SCRIPT = """
import json, sys
sys.path = json.loads(sys.argv[1])
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import test_every_process
print(json.dumps(test_every_process.all_of_them()))
"""


def all_of_them() -> dict[str, str]:
    """What a process makes that others must make alike."""
    program = test_cache.traced()
    key = test_cache.key_of(program, test_cache.rules_for(program), test_cache.options_of(**test_cache.OPTIONS))
    model, shape = SMALL["tied"](), {"x": 4, "y": 2}
    options = {"mesh": mesh_of(shape), "topology": slow_chips(shape), "donate_argnums": 0}
    plan = autoshard.plan(model.step, model.state, model.batches(0), **options)
    assert plan.alternatives
    text = text_of_value((frozenset(SMALL), set(SMALL)))
    hashed = str(hash("batch"))
    return {"key": key, "fingerprint": fingerprint(), "plan": plan.dumps(), "text": text, "hash": hashed}


def fingerprint() -> str:
    model = SMALL["gpt scan"]()
    return trace(model.step, (model.state, model.batches(0)), {}, donate_argnums=0).fingerprint


@pytest.fixture(scope="module")
def made():
    """What this process made, and another one under another seed of Python's hashes of strings."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([entry for entry in sys.path if entry])]
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {"PYTHONHASHSEED": seed, "XLA_FLAGS": compilation.CPU_ONLY}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    return all_of_them(), json.loads(done.stdout)


def test_plans_are_equal_bit_for_bit(made):
    one, other = (each["plan"] for each in made)
    assert one == other
    assert json.loads(one)["alternatives"] and json.loads(one)["homes"]


def test_keys_of_caches_are_equal(made):
    one, other = (each["key"] for each in made)
    assert one == other and len(one) > 20


def test_fingerprints_are_equal(made):
    one, other = (each["fingerprint"] for each in made)
    assert one == other and one


def test_texts_of_static_arguments_are_equal(made):
    """Code of a plan compares them with those of the process that wrote it."""
    one, other = (each["text"] for each in made)
    assert one == other and "'gpt scan'" in one


def test_hashes_of_strings_differ_between_the_processes(made):
    """Without that, the tests above could not fail."""
    one, other = (each["hash"] for each in made)
    assert one != other
