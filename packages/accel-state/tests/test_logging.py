from __future__ import annotations

import logging

import pytest

from accel_state.environ import patch_environment
from accel_state.errors import SettingsError
from accel_state.logging import get_logger
from accel_state.runtime import current
from accel_state.testing import ThreadRanks

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def logger(request):
    adapter = get_logger(f"tests.{request.node.name}", log_level="DEBUG")
    yield adapter
    adapter.logger.setLevel(logging.NOTSET)


def test_a_message_carries_the_line_of_its_caller(logger, caplog):
    logger.info("hello %s", "you")
    logger.log(logging.ERROR, "bye")
    logger.warning_once("careful")
    assert [record.getMessage() for record in caplog.records] == ["hello you", "bye", "careful"]
    names = {record.funcName for record in caplog.records}
    assert names == {"test_a_message_carries_the_line_of_its_caller"}


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, False), ({"main_process_only": True}, False), ({"main_process_only": False}, True)],
)
def test_only_the_main_process_speaks_unless_all_may(logger, caplog, options, said):
    with patch_environment(rank=1, world_size=2):
        logger.info("hello", **options)
    assert bool(caplog.records) == said


def test_a_message_below_the_level_is_dropped(logger, caplog):
    logger.logger.setLevel("ERROR")
    logger.info("hello")
    assert not caplog.records


def test_logging_in_order_waits_for_ranks_whose_level_is_higher(caplog):
    ranks = ThreadRanks(size=2)

    def body(rank):
        logger = get_logger(f"tests.levels.{rank}", log_level="ERROR" if rank else "INFO")
        logger.info("hello from %d", rank, main_process_only=False, in_order=True)
        return current().collectives.all_gather_object(rank)

    assert ranks.run(body) == [[0, 1]] * 2
    assert ranks.messages == ["barrier", "barrier", "all_gather_object"]
    assert [record.getMessage() for record in caplog.records] == ["hello from 0"]


def test_a_warning_is_said_once_for_the_same_words(logger, caplog):
    for word in ("a", "b", "a"):
        logger.warning_once("beware of %s", word)
    assert [record.getMessage() for record in caplog.records] == ["beware of a", "beware of b"]


def test_a_warning_is_said_once_whatever_its_arguments(logger, caplog):
    for names in (["a"], ["b"], ["a"]):
        logger.warning_once("beware of %s", names, extra={"job": {"seven": 7}})
    assert [record.getMessage() for record in caplog.records] == ["beware of ['a']", "beware of ['b']"]


def test_extra_values_reach_the_record(logger, caplog):
    logger.extra = {"job": "seven"}
    logger.info("hello")
    assert caplog.records[0].job == "seven"


def test_the_level_comes_from_the_argument_before_the_environment():
    with patch_environment(accelerate_log_level="error"):
        assert get_logger("tests.level.environment").logger.level == logging.ERROR
        assert get_logger("tests.level.argument", log_level="INFO").logger.level == logging.INFO
    assert get_logger("tests.level.neither").logger.level == logging.NOTSET


def test_a_level_that_does_not_exist_names_where_it_was_given():
    with patch_environment(accelerate_log_level="LOUD"), pytest.raises(SettingsError, match="ACCELERATE_LOG"):
        get_logger("tests.level.bad")
    with pytest.raises(SettingsError, match="log_level='quiet'"):
        get_logger("tests.level.bad", log_level="quiet")


def test_other_loggers_keep_their_level():
    before = logging.root.level
    get_logger("tests.level.root", log_level="DEBUG")
    assert logging.root.level == before
