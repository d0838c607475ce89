"""Settings from flags and the environment, and back to flags for the services."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import GATEWAY, SERVICES, Settings, parse_settings
from shared.setting_checks import ABOVE_ZERO, AT_LEAST_ONE, KV_CACHE_DTYPES, NOT_NEGATIVE

ISSUE_FLAGS = {
    "--model": "demo",
    "--port": 8000,
    "--host": "127.0.0.1",
    "--dtype": "auto",
    "--max-model-len": None,
    "--max-num-seqs": None,
    "--max-num-batched-tokens": None,
    "--max-prefill-tokens": None,
    "--max-num-partial-prefills": 1,
    "--block-size": 16,
    "--gpu-memory-utilization": 0.9,
    "--num-gpu-blocks-override": None,
    "--enable-prefix-caching": True,
    "--enable-chunked-prefill": True,
    "--watermark": 0.01,
    "--seed": 0,
    "--served-model-name": [],
    "--revision": None,
    "--tokenizers": 1,
}
"""The flags whose names and defaults users know from vLLM, and the launcher's own."""


def parse(*argv: str, service: str | None = None, **environ: str) -> Settings:
    return parse_settings(service, argv, environ=environ, positional_model=service is None)


@pytest.mark.parametrize(("flag", "default"), ISSUE_FLAGS.items())
def test_flag_has_its_name_and_default(flag: str, default: object) -> None:
    assert getattr(parse(), flag[2:].replace("-", "_")) == default


def test_model_is_positional_or_a_flag() -> None:
    assert parse("some/model").model == parse("--model", "some/model").model == "some/model"


@pytest.mark.parametrize(("text", "value"), [("512", 512), ("16k", 16_000), ("16K", 16_384), ("1.5k", 1_500)])
def test_whole_numbers_take_units(text: str, value: int) -> None:
    assert parse("--max-model-len", text).max_model_len == value


@pytest.mark.parametrize("text", ["1.5", "x", "0", "-3", ""])
def test_what_is_no_length_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(f"--max-model-len={text}")
    assert exit_.value.code == 2
    assert "--max-model-len" in capsys.readouterr().err


def test_environment_gives_every_kind_of_value() -> None:
    found = parse(
        HEADRACE_MODEL="m",
        HEADRACE_PORT="81",
        HEADRACE_WATERMARK="0.5",
        HEADRACE_ENABLE_PREFIX_CACHING="false",
        HEADRACE_API_KEY="a, b",
        HEADRACE_MAX_MODEL_LEN="2k",
    )
    assert found == Settings(
        model="m", port=81, watermark=0.5, enable_prefix_caching=False, api_key=["a", "b"], max_model_len=2000
    )


def test_flag_wins_over_environment() -> None:
    environ = {"HEADRACE_PORT": "81", "HEADRACE_API_KEY": "a", "HEADRACE_ENFORCE_EAGER": "1"}
    found = parse("--port", "8000", "--api-key", "b", "c", "--no-enforce-eager", **environ)
    assert (found.port, found.api_key, found.enforce_eager) == (8000, ["b", "c"], False)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HEADRACE_PORT", "tcp://10.0.0.1:8000"), ("HEADRACE_DTYPE", "int3"), ("HEADRACE_PORT", "70000")],
)
def test_bad_environment_is_named(variable: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(**{variable: value})
    assert exit_.value.code == 2
    assert value in capsys.readouterr().err


def test_unknown_flag_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse("--max-num-seq", "4")
    assert exit_.value.code == 2
    assert "did you mean --max-num-seqs?" in capsys.readouterr().err


def test_a_service_refuses_a_flag_that_is_not_its_own() -> None:
    with pytest.raises(SystemExit):
        parse("--max-num-seqs=4", service=GATEWAY)


@pytest.mark.parametrize(
    "field", [f for f in dataclasses.fields(Settings) if f.metadata["choices"]], ids=lambda f: f.name
)
def test_choices_contain_the_default(field: dataclasses.Field[object]) -> None:
    assert field.default in field.metadata["choices"]


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_dtype_of_the_kv_cache(name: str) -> None:
    assert parse("--kv-cache-dtype", name).kv_cache_dtype == name


@pytest.mark.parametrize(
    ("name", "words"), [("int4", "auto, bfloat16, .*fp8_e4m3"), ("fp8_e5m2", "mantissa.*take fp8")]
)
@pytest.mark.parametrize("argv", [["--kv-cache-dtype", "{}"], []], ids=["flag", "environment"])
def test_another_dtype_of_the_kv_cache_is_refused(
    name: str, words: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {} if argv else {"HEADRACE_KV_CACHE_DTYPE": name}
    with pytest.raises(SystemExit):
        parse(*[item.format(name) for item in argv], **environ)
    assert re.search(f"--kv-cache-dtype {name} is not supported.*{words}", capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize(
    ("flag", "words", "values"),
    [
        *((f, "must be above 0", ("0", "-1", "nan", "inf")) for f in ("--beat-s", "--lease-s", "--step-timeout-s")),
        *(
            (f, "must be at least 1", ("0", "-1"))
            for f in ("--max-connections", "--max-body-bytes", "--kv-cache-bytes")
        ),
        ("--num-gpu-blocks-override", "must be at least 1", ("0", "-3")),
        *((f"--max-num-queued-{what}", "must be 0 or more", ("-1",)) for what in ("reqs", "tokens")),
        ("--shutdown-timeout", "must be 0 or more", ("-1", "nan", "inf")),
    ],
)
def test_what_can_never_work_is_refused_before_anything_starts(
    flag: str, words: str, values: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        with pytest.raises(SystemExit):
            parse(flag, value)
        assert f"{flag} {words}, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--swap-space", "--kv-offloading-size"])
def test_sizes_in_host_memory(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert getattr(parse(flag, "0.5"), flag[2:].replace("-", "_")) == 0.5
    for value in ("-1", "inf", "nan"):
        with pytest.raises(SystemExit):
            parse(flag, value)
        assert f"{flag} must be 0 or more, got {float(value)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        *((name, ("0", "-1"), "must be at least 1") for name in AT_LEAST_ONE),
        *((name, ("-1",), "must be 0 or more") for name in NOT_NEGATIVE),
        *((name, ("0", "-1", "nan", "inf"), "must be above 0") for name in ABOVE_ZERO),
    ],
)
def test_numbers_that_nothing_can_work_with(
    name: str, values: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--" + name.replace("_", "-")
    assert getattr(parse(f"{flag}=2"), name) == 2
    for value in values:
        with pytest.raises(SystemExit):
            parse(f"{flag}={value}")
        assert f"{flag} {words}, got {value}" in capsys.readouterr().err


def test_swapping_needs_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--preemption-mode", "swap", "--swap-space", "1").preemption_mode == "swap"
    with pytest.raises(SystemExit):
        parse("--preemption-mode", "swap", "--kv-offloading-size", "1")
    assert "give --swap-space" in capsys.readouterr().err


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1)


@given(
    model=_TEXT,
    names=st.lists(_TEXT),
    length=st.none() | st.integers(1, 10**9),
    caching=st.booleans(),
    seqs=st.integers(1, 10**6),
    watermark=st.floats(0, 1, exclude_max=True),
    level=st.sampled_from(["debug", "error"]),
)
def test_to_argv_round_trip(
    model: str, names: list[str], length: int | None, caching: bool, seqs: int, watermark: float, level: str
) -> None:
    settings = Settings(
        model=model,
        served_model_name=names,
        max_model_len=length,
        enable_prefix_caching=caching,
        max_num_seqs=seqs,
        watermark=watermark,
        log_level=level,
        listen="ipc:///x",
    )
    for service in SERVICES:
        again = parse_settings(service, settings.to_argv(service), environ={})
        for field in dataclasses.fields(Settings):
            taken = service in field.metadata["services"]
            expected = getattr(settings if taken else Settings(), field.name)
            assert getattr(again, field.name) == expected
