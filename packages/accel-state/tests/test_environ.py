from __future__ import annotations

import asyncio
import unittest

import pytest

from accel_state import environ
from accel_state.environ import purge_accelerate_environment
from accel_state.errors import SettingsError


def accelerate_variables():
    return {name for name in environ.read() if name.startswith("ACCELERATE_")}


@pytest.mark.parametrize("text", ["y", "YES", "t", "True", "on", "1", " true "])
def test_these_texts_mean_true(text):
    assert environ.str_to_bool(text) == 1
    assert environ.str_to_bool(text, to_bool=True) is True


@pytest.mark.parametrize("text", ["n", "No", "f", "FALSE", "off", "0"])
def test_these_texts_mean_false(text):
    assert environ.str_to_bool(text) == 0
    assert environ.str_to_bool(text, to_bool=True) is False


def test_another_text_is_no_truth_value_and_is_named():
    with pytest.raises(SettingsError, match="'maybe'"):
        environ.str_to_bool("maybe")


def test_a_bad_flag_names_its_variable():
    with (
        environ.patch_environment(some_flag="maybe"),
        pytest.raises(SettingsError, match=r"SOME_FLAG.*'maybe'"),
    ):
        environ.parse_flag_from_env("SOME_FLAG")


def test_a_bad_integer_names_its_variable():
    with environ.patch_environment(some_int="x1"), pytest.raises(SettingsError, match=r"SOME_INT='x1'"):
        environ.get_int_from_env(["SOME_INT"], 1)


def test_the_first_variable_that_holds_a_number_wins():
    with environ.patch_environment(some_int=-1, other_int=3, third_int=4):
        assert environ.get_int_from_env(["SOME_INT", "MISSING_INT", "OTHER_INT", "THIRD_INT"], 9) == 3


def test_a_patched_environment_is_put_back_after_an_error():
    environ_before = environ.read()
    with pytest.raises(ZeroDivisionError), environ.patch_environment(path="/nowhere", brand_new=1):
        1 / (environ.read()["PATH"] != "/nowhere")
    assert environ.read() == environ_before


def test_a_cleared_environment_is_put_back_after_an_error():
    environ_before = environ.read()
    with pytest.raises(ZeroDivisionError), environ.clear_environment():
        1 / len(environ.read())
    assert environ.read() == environ_before


def test_a_purged_function_keeps_what_was_there_and_what_is_not_ours():
    @purge_accelerate_environment
    def configure():
        environ.publish({"ACCELERATE_OLD": "new", "ACCELERATE_ADDED": "1", "OTHER_ADDED": "1"})
        return 5

    with environ.patch_environment(accelerate_old="old", other_added="0"):
        assert configure() == 5
        assert accelerate_variables() == {"ACCELERATE_OLD"}
        assert (environ.read()["ACCELERATE_OLD"], environ.read()["OTHER_ADDED"]) == ("old", "1")


def test_a_purged_function_that_calls_another_keeps_its_values():
    @purge_accelerate_environment
    def inner():
        environ.publish({"ACCELERATE_OLD": "inner", "ACCELERATE_INNER": "1"})

    @purge_accelerate_environment
    def outer():
        environ.publish({"ACCELERATE_OLD": "outer"})
        environ.remove(["ACCELERATE_GONE"])
        inner()
        return {name: environ.read()[name] for name in accelerate_variables()}

    with environ.patch_environment(accelerate_old="old", accelerate_gone="1"):
        assert outer() == {"ACCELERATE_OLD": "outer"}
        assert accelerate_variables() == {"ACCELERATE_OLD"}  # what is removed stays away, as with Accelerate
        assert environ.read()["ACCELERATE_OLD"] == "old"


def test_a_purged_function_that_raises_leaves_nothing_behind():
    @purge_accelerate_environment
    def configure():
        environ.publish({"ACCELERATE_ADDED": "1"})
        raise KeyError

    with pytest.raises(KeyError):
        configure()
    assert accelerate_variables() == set()


def test_a_purged_coroutine_is_purged_when_it_ends_not_when_it_is_made():
    @purge_accelerate_environment
    async def configure():
        environ.publish({"ACCELERATE_ADDED": "1"})
        await asyncio.sleep(0)
        return accelerate_variables()

    assert asyncio.run(configure()) == {"ACCELERATE_ADDED"}
    assert accelerate_variables() == set()


def test_every_kind_of_test_is_purged_also_in_subclasses():
    @purge_accelerate_environment
    class Base:
        value = 3

        def test_plain(self):
            environ.publish({"ACCELERATE_PLAIN": "1"})
            return self.value

        @staticmethod
        def test_static():
            environ.publish({"ACCELERATE_STATIC": "1"})
            return 1

        @classmethod
        def test_of_class(cls):
            environ.publish({"ACCELERATE_CLASS": "1"})
            return cls

    class Child(Base):
        def test_more(self):
            environ.publish({"ACCELERATE_MORE": "1"})
            return 2

    done = (Base().test_plain(), Base.test_static(), Child.test_of_class(), Child().test_more())
    assert done == (3, 1, Child, 2)
    assert accelerate_variables() == set()


def test_what_a_helper_sets_lasts_until_its_test_ends():
    @purge_accelerate_environment
    class Case:
        def configure(self):
            environ.publish({"ACCELERATE_OLD": "new", "ACCELERATE_ADDED": "1"})

        def test_it(self):
            self.configure()
            return environ.read()["ACCELERATE_OLD"], accelerate_variables()

    with environ.patch_environment(accelerate_old="old"):
        assert Case().test_it() == ("new", {"ACCELERATE_OLD", "ACCELERATE_ADDED"})
        assert (environ.read()["ACCELERATE_OLD"], accelerate_variables()) == ("old", {"ACCELERATE_OLD"})


def run(case):
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun == 2
    assert not result.errors, result.errors
    assert not result.failures, result.failures


def test_a_class_with_a_subclass_hook_of_its_own_keeps_it():
    names = []

    @purge_accelerate_environment
    class Base:
        def __init_subclass__(cls, **kwargs):
            names.append(cls.__name__)

    class Child(Base):
        def test_it(self):
            environ.publish({"ACCELERATE_CHILD": "1"})

    Child().test_it()
    assert names == ["Child"]
    assert accelerate_variables() == set()


def test_what_set_up_sets_stays_as_with_accelerate(monkeypatch):
    monkeypatch.setenv("ACCELERATE_SETUP", "0")  # so that the test's end removes it

    @purge_accelerate_environment
    class Case(unittest.TestCase):
        def setUp(self):
            environ.publish({"ACCELERATE_SETUP": "1"})

        def test_one(self):
            environ.publish({"ACCELERATE_TEST": "1"})

        def test_two(self):
            assert accelerate_variables() == {"ACCELERATE_SETUP"}

    run(Case)
    assert accelerate_variables() == {"ACCELERATE_SETUP"}
    assert environ.read()["ACCELERATE_SETUP"] == "1"


def test_lines_that_an_environment_file_cannot_hold_are_left_out_with_a_warning(caplog):
    lines = environ.convert_dict_to_env_variables(
        {"GOOD": 1, "BAD": "a;b", "WORSE": "a\nb", "A=B": "x", "EMPTY": ""}
    )
    assert lines == ["GOOD=1\n"]
    assert [name in caplog.text for name in ("BAD", "WORSE", "A=B", "EMPTY")] == [True] * 4


def test_libraries_that_are_imported_are_reported_in_the_order_asked():
    assert environ.are_libraries_initialized("unittest", "surely_not_there", "asyncio") == [
        "unittest",
        "asyncio",
    ]
