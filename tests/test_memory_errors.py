"""An error of memory finds what is needed once that is asked for, and may be copied and sent to other processes."""

import copy
import math
import pickle

import pytest

from autoshard.errors import MemoryLimitError, of_least_need


class Refused:
    """An error, and how often it was asked what is needed."""

    def __init__(self, least: float, needed: float):
        self.asked = 0

        def sought() -> float:
            self.asked += 1
            return needed

        self.error = MemoryLimitError("it needs {:g}".format, budget=1, needed=sought, least=least)


def test_of_several_those_are_asked_that_may_need_the_least():
    refused = Refused(9, 12), Refused(4, 8), Refused(6, 7), Refused(7.5, 7.6)
    assert of_least_need([one.error for one in refused]) is refused[2].error
    assert [one.asked for one in refused] == [0, 1, 1, 0]
    late = Refused(4, 8), Refused(6, 7)
    assert of_least_need([one.error for one in late], until=0.0) is late[0].error
    assert [one.asked for one in late] == [1, 0]


def test_a_bound_that_is_too_high_hides_the_least():
    assert of_least_need([Refused(9, 5).error, Refused(4, 8).error]).needed == 8


def test_the_message_asks_once_and_what_it_asked_is_let_go():
    refused = Refused(4, 8)
    with pytest.raises(MemoryLimitError, match="it needs 8"):
        raise refused.error
    assert (str(refused.error), refused.error.needed, refused.asked) == ("it needs 8", 8, 1)
    assert repr(refused.error) == "MemoryLimitError('it needs 8')" and refused.error.args == ("it needs 8",)
    assert not any(map(callable, vars(refused.error).values()))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_says_the_same(copied):
    for error in (Refused(4, 8).error, MemoryLimitError("it is late", budget=1, needed=math.inf)):
        other = copied(error)
        assert type(other) is MemoryLimitError
        assert (str(other), other.budget, other.needed, other.least) == (str(error), 1, error.needed, error.least)
