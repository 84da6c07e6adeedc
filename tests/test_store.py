"""Both stores: put once, read whole, whatever happens meanwhile."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from etils.epath import backend
from fsspec.implementations import memory
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax.exchange import store as store_lib

ROOT = pathlib.Path(__file__).parent.parent
ODD = ["a/b", "..", ".", ".hidden", "x~", "é 日本\n", "%2F", "A", "\ud800", "-"]


@pytest.fixture(params=["memory", "directory", "bucket"])
def store(request, tmp_path, monkeypatch):
  if request.param == "memory":
    return store_lib.Memory()
  if request.param == "directory":
    return store_lib.Directory(tmp_path / "exchange")
  bucket = memory.MemoryFileSystem()
  monkeypatch.setattr(bucket, "store", {})
  monkeypatch.setattr(bucket, "pseudo_dirs", [""])
  monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: bucket)
  return store_lib.Directory("az://bucket/exchange")


def test_what_was_put_is_got(store):
  assert store.get("char", 0) is None
  assert store.policies() == [] and store.rounds("char") == []
  assert store.put("char", 3, b"three\n\x00")
  assert store.put("char", 0, b"")
  assert store.put("merged", 1_234_567, b"late")
  assert store.get("char", 3) == b"three\n\x00"
  assert store.get("char", 0) == b""
  assert store.get("char", 1) is None and store.get("merged", 3) is None
  assert store.rounds("char") == [0, 3]
  assert store.rounds("merged") == [1_234_567]
  assert store.policies() == ["char", "merged"]


def test_the_same_content_again_changes_nothing(store):
  assert store.put("char", 3, b"x") is True
  assert store.put("char", 3, b"x") is False
  assert store.get("char", 3) == b"x"


@pytest.mark.parametrize("first", [b"x", b""])
def test_other_content_is_a_conflict_that_names_its_place(store, first):
  store.put("char", 3, first)
  with pytest.raises(store_lib.Conflict, match="'char', round 3"):
    store.put("char", 3, b"y")
  assert store.get("char", 3) == first
  assert store.put("char", 4, b"y") and store.put("merged", 3, b"y")


@pytest.mark.parametrize("policy", [None, "char"])
def test_a_run_that_resumes_forgets_what_it_repeats(store, policy):
  for name in ("char", "merged"):
    for number in range(4):
      store.put(name, number, b"old")
  store.forget(2, policy)
  kept = [0, 1] if policy is None else [0, 1, 2, 3]
  assert store.rounds("char") == [0, 1] and store.rounds("merged") == kept
  assert store.put("char", 2, b"new") and store.get("char", 2) == b"new"
  store.forget(0)
  assert store.policies() == []
  store.forget(0)
  store.forget(0, "nobody")


def test_odd_names_stay_apart(store):
  for i, name in enumerate(ODD):
    assert store.put(name, i, str(i).encode())
  assert store.policies() == sorted(ODD)
  for i, name in enumerate(ODD):
    assert store.get(name, i) == str(i).encode() and store.rounds(name) == [i]


@given(st.text(min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_any_name_is_a_file_name(name):
  quoted = store_lib._quote(name)
  assert quoted.isascii() and not set(quoted) & set("/.~\\ \n*?$")
  assert store_lib._unquote(quoted) == name


def test_a_name_or_round_that_makes_no_sense(store):
  with pytest.raises(ValueError, match="policy: ''"):
    store.put("", 0, b"")
  with pytest.raises(ValueError, match="round: -1"):
    store.get("char", -1)


@pytest.fixture
def shared(store):
  """Without the stand-in for a bucket, which is for one thread."""
  if isinstance(store, store_lib.Directory) and "az:" in str(store._root):
    pytest.skip("fsspec's files in memory have one position for all readers")
  return store


def test_of_many_threads_one_publishes(shared):
  store = shared
  barrier = threading.Barrier(8)

  def put(data):
    barrier.wait()
    try:
      return store.put("char", 0, data)
    except store_lib.Conflict:
      return None

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    same = list(pool.map(put, [b"same" * 999] * 8))
    assert sorted(same) == [False] * 7 + [True]
    store.forget(0)
    contents = [bytes([65 + i]) * 9999 for i in range(8)]
    other = list(pool.map(put, contents))
  assert other.count(True) == 1 and other.count(None) == 7
  assert store.get("char", 0) == contents[other.index(True)]


def test_readers_see_all_or_nothing_while_others_write(shared):
  store = shared
  size, done = 300_000, threading.Event()
  seen = set()

  def read():
    while not done.is_set():
      for number in store.rounds("char"):
        data = store.get("char", number)
        seen.add(None if data is None else (len(data), len(set(data))))

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    readers = [pool.submit(read) for _ in range(2)]
    writers = [
      pool.submit(
        lambda k=k: [
          store.put("char", 2 * i + k, bytes([i + 1]) * size) for i in range(15)
        ]
      )
      for k in range(2)
    ]
    try:
      for writer in writers:
        writer.result()
    finally:
      done.set()
    for reader in readers:
      reader.result()
  assert store.rounds("char") == list(range(30))
  assert seen <= {None, (size, 1)}


# Folders.


def test_two_stores_on_one_folder_agree(tmp_path):
  left, right = (store_lib.Directory(str(tmp_path)) for _ in range(2))
  assert left.put("char", 0, b"x") and right.get("char", 0) == b"x"
  with pytest.raises(store_lib.Conflict):
    right.put("char", 0, b"y")


def test_a_shipment_is_a_file_that_people_find(tmp_path):
  store_lib.Directory(tmp_path).put("char", 12, b"x\n")
  assert (tmp_path / "char" / "000012.jsonl").read_bytes() == b"x\n"
  assert os.listdir(tmp_path / "char") == ["000012.jsonl"]  # nothing left over


def test_other_files_are_not_shipments(tmp_path):
  store = store_lib.Directory(tmp_path)
  store.put("char", 0, b"x")
  for name in ("notes.txt", "1.jsonl", "0000001.jsonl", "00000x.jsonl"):
    (tmp_path / "char" / name).write_text("?")
  (tmp_path / "README").write_text("?")
  (tmp_path / "%zz").mkdir()
  (tmp_path / "%FF").mkdir()
  (tmp_path / "%FF" / "000000.jsonl").write_text("?")
  assert store.rounds("char") == [0] and store.policies() == ["char"]
  store.forget(0)
  assert (tmp_path / "char" / "notes.txt").exists()


KILLED = """
import os, signal
from etils import epath
from mrl_jax.exchange import store as store_lib
store = store_lib.Directory({path!r})
store.put("char", 0, b"whole")
def die(*unused):
  os.kill(os.getpid(), signal.SIGKILL)
{fault}
store.put("char", 1, b"x" * 10_000_000)
"""
FAULTS = {
  "before its name": "store_lib._publish = die",
  "while writing": (
    "class Half(type(epath.Path('/'))):\n"
    "  def write_bytes(self, data):\n"
    "    open(self, 'wb').write(data[:5_000_000]); die()\n"
    "store._root = Half(store._root)"
  ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path, fault):
  code = KILLED.format(path=str(tmp_path), fault=FAULTS[fault])
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
  assert done.returncode == -9
  left = [p for p in os.listdir(tmp_path / "char") if p.endswith(".tmp")]
  assert len(left) == 1
  store = store_lib.Directory(tmp_path)
  assert store.rounds("char") == [0] and store.get("char", 1) is None
  assert store.put("char", 1, b"again")
  store.forget(1)
  assert os.listdir(tmp_path / "char") == ["000000.jsonl"]


def test_without_hard_links_it_is_a_rename(tmp_path, monkeypatch):
  def refuse(*unused):
    raise OSError("no links on this file system")

  monkeypatch.setattr(os, "link", refuse)
  store = store_lib.Directory(tmp_path)
  assert store.put("char", 0, b"x") and not store.put("char", 0, b"x")
  with pytest.raises(store_lib.Conflict):
    store.put("char", 0, b"y")
  assert os.listdir(tmp_path / "char") == ["000000.jsonl"]


def test_a_file_that_vanishes_while_it_is_listed_or_read(tmp_path):
  store = store_lib.Directory(tmp_path)
  for number in range(50):
    store.put("char", number, b"x" * 100)
  stop = threading.Event()

  def read():
    found = set()
    while not stop.is_set():
      for number in range(50):
        found.add(store.get("char", number))
      store.policies()
    return found

  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    reader = pool.submit(read)
    store.forget(0)
    stop.set()
    assert reader.result() <= {None, b"x" * 100}


def test_what_cannot_be_opened_is_an_error_of_the_system(tmp_path):
  (tmp_path / "char" / "000000.jsonl").mkdir(parents=True)
  with pytest.raises(IsADirectoryError):
    store_lib.Directory(tmp_path).get("char", 0)
