"""Plans, fingerprints, keys of caches and texts of values are the same in every process, whatever Python's hashes are.

Two processes make all of them, since a process takes longer to start than to make one of them.
"""

import json
import subprocess
import sys

import compilation
import pytest
from oracles import SMALL

from autoshard.program import trace

MADE = """
import json, sys
sys.path = json.loads(sys.argv[1])
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import test_cache, test_every_process
from oracles import SMALL, mesh_of, slow_chips
import autoshard
from autoshard.program.signature import text_of_value

program = test_cache.traced()
key = test_cache.key_of(program, test_cache.rules_for(program), test_cache.options_of(**test_cache.OPTIONS))
model, shape = SMALL["tied"](), {"x": 4, "y": 2}
plan = autoshard.plan(model.step, model.state, model.batches(0), mesh=mesh_of(shape), topology=slow_chips(shape),
                      donate_argnums=0)
plan.alternatives
text = text_of_value((frozenset(SMALL), set(SMALL)))
made = {"key": key, "fingerprint": test_every_process.fingerprint(), "plan": plan.dumps(), "text": text}
print(json.dumps(made))
"""


def fingerprint() -> str:
    model = SMALL["gpt scan"]()
    return trace(model.step, (model.state, model.batches(0)), {}, donate_argnums=0).fingerprint


@pytest.fixture(scope="module")
def made():
    """What two processes made, under other seeds of Python's hashes of strings."""

    def printed(seed: str) -> dict[str, str]:
        command = [sys.executable, "-c", MADE, json.dumps([entry for entry in sys.path if entry])]
        environment = {"PYTHONHASHSEED": seed, "XLA_FLAGS": compilation.CPU_ONLY}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
        return json.loads(done.stdout)

    return printed("0"), printed("1")


def test_plans_are_equal_bit_for_bit(made):
    one, other = (each["plan"] for each in made)
    assert one == other
    assert json.loads(one)["alternatives"] and json.loads(one)["homes"]


def test_keys_of_caches_are_equal(made):
    one, other = (each["key"] for each in made)
    assert one == other and len(one) > 20


def test_fingerprints_are_those_of_this_process(made):
    assert {each["fingerprint"] for each in made} == {fingerprint()}


def test_texts_of_static_arguments_are_equal(made):
    """Code of a plan compares them with those of the process that wrote it."""
    one, other = (each["text"] for each in made)
    assert one == other and "'gpt scan'" in one


def test_hashes_of_strings_differ_between_the_processes():
    """Without that, the tests above could not fail."""
    hashes = {
        subprocess.run(
            [sys.executable, "-S", "-c", "print(hash('batch'))"], env={"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE
        ).stdout
        for seed in "01"
    }
    assert len(hashes) == 2
