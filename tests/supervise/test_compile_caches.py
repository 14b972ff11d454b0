from pathlib import Path

from holdfast.supervise.compile_caches import cache_variables, compile_folder, program_folder


def test_caches_are_set_where_the_user_has_set_none(tmp_path: Path) -> None:
    variables = cache_variables({}, tmp_path)
    assert variables == {
        "JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/inductor",
    }
    assert cache_variables(variables, tmp_path) == {}


def test_a_cache_of_the_user_keeps_all_its_settings(tmp_path: Path) -> None:
    assert set(cache_variables({"JAX_COMPILATION_CACHE_DIR": "/mine"}, tmp_path)) == {
        "TORCHINDUCTOR_CACHE_DIR"
    }


def test_caches_are_beside_a_run_with_a_directory_and_never_in_a_bucket(tmp_path: Path) -> None:
    program = program_folder({"XDG_CACHE_HOME": str(tmp_path)}, ("python", "train.py"))
    beside = compile_folder(str(tmp_path / "runs" / "a"), program, "h")
    assert beside == tmp_path / "runs" / ".holdfast-compiled" / "h"
    for directory in (None, "s3://bucket/runs/a"):
        assert compile_folder(directory, program, "h") == program / "compiled" / "h"
    assert program.is_relative_to(tmp_path / "holdfast")
