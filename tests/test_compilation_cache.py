"""Where compiled programs are kept."""

import jax
import pytest

from experiments import compilation


@pytest.fixture(autouse=True)
def restored():
  names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def test_auto_is_the_users_cache_unless_there_is_another(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  jax.config.update("jax_compilation_cache_dir", None)
  folder = compilation.keep("auto")
  assert folder.startswith(str(tmp_path / "mrl_jax"))
  assert jax.config.jax_compilation_cache_dir == folder
  jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
  assert compilation.keep("auto") == "gs://bucket/cache"


def test_a_folder_or_none(tmp_path):
  assert compilation.keep(str(tmp_path)) == str(tmp_path)
  assert jax.config.jax_compilation_cache_dir == str(tmp_path)
  assert compilation.keep("none") is None
  assert not jax.config.jax_enable_compilation_cache
