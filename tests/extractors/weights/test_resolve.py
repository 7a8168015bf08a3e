import hashlib
import pathlib
import pickle
import urllib.error
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from extractors.networks import PretrainedWeights
from extractors.weights.resolve import Architecture, Weights, resolve_weights, state_sha256
from schemas.errors import InputError, UsageError

DEFAULT = PretrainedWeights("Tiny_Weights.V1", "https://example.org/models/tiny-0123abcd.pth")


def build() -> nn.Module:
    return nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 4, 3), bn1=nn.BatchNorm2d(4)))


ARCHITECTURE = Architecture(build=build, default=DEFAULT)


class Trap:
    """Writes a file when unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return (pathlib.Path.touch, (self.path,))


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return {
        name: torch.rand(value.shape, generator=random) if value.is_floating_point() else value
        for name, value in build().state_dict().items()
    }


def saved(path: pathlib.Path, content: object) -> str:
    torch.save(content, path)
    return str(path)


def digest(state: dict[str, torch.Tensor]) -> str:
    """The SHA-256 of weights, computed from its definition: name, type, shape and little-endian values, in order of names."""
    text = b""
    for name, tensor in sorted(state.items()):
        if not name.endswith("num_batches_tracked"):
            array = tensor.numpy()
            text += (
                f"{name} {array.dtype} {list(array.shape)}\n".encode() + array.astype(array.dtype.newbyteorder("<")).tobytes()
            )
    return hashlib.sha256(text).hexdigest()


def assert_same(found: Weights, state: dict[str, torch.Tensor]) -> None:
    assert sorted(found.state) == sorted(state)
    for name, value in state.items():
        assert torch.equal(found.state[name], value), name


FORMATS = {
    "zip": lambda state, path: torch.save(state, path),
    "before 1.6": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "safetensors": lambda state, path: save_file(state, path.with_suffix(".safetensors")),
    "reversed": lambda state, path: torch.save(dict(reversed(state.items())), path),
    "another layout in memory": lambda state, path: torch.save(
        state | {"conv1.weight": state["conv1.weight"].to(memory_format=torch.channels_last)}, path
    ),
    "one storage": lambda state, path: torch.save(state | {"bn1.bias": torch.cat([state["bn1.bias"]] * 2)[4:]}, path),
    "float64": lambda state, path: torch.save(state | {"conv1.bias": state["conv1.bias"].double()}, path),
    "no counters": lambda state, path: torch.save({k: v for k, v in state.items() if "num_batches" not in k}, path),
    "other counters": lambda state, path: torch.save(state | {"bn1.num_batches_tracked": torch.tensor(77)}, path),
    "parameters": lambda state, path: torch.save({k: nn.Parameter(v, v.is_floating_point()) for k, v in state.items()}, path),
}


@pytest.mark.parametrize("name", FORMATS)
def test_resolve_weights_equal_tensors_have_equal_digest_in_any_format(tmp_path, state, name):
    FORMATS[name](state, tmp_path / "w.pth")
    (path,) = tmp_path.iterdir()
    found = resolve_weights(str(path), ARCHITECTURE)
    assert found.parameters() == {"weights": {"sha256": digest(state)}, "untrained": False}
    assert_same(found, state | ({"bn1.num_batches_tracked": torch.tensor(77)} if name == "other counters" else {}))


@pytest.mark.parametrize("name", ["w.pth.tar", "w.bin", "w.ckpt", "w", "w.safetensors", "w.pkl", "w.caffemodel", "w#1.pth"])
@pytest.mark.parametrize(
    "write",
    [
        torch.save,
        lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
        save_file,
        lambda state, path: path.write_bytes(pickle.dumps({name: values.numpy() for name, values in state.items()})),
    ],
    ids=["zip", "before 1.6", "safetensors", "pickle"],
)
def test_resolve_weights_format_is_detected_from_content(tmp_path, state, name, write):
    write(state, tmp_path / name)
    found = resolve_weights(str(tmp_path / name), ARCHITECTURE)
    assert found.parameters() == {"weights": {"sha256": digest(state)}, "untrained": False}
    assert found.remark == ""


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\x00", r"of an unknown format \(it begins with b'\\x00'\)"),
        (b"\x1f\x8b" + bytes(30), "a gzip archive"),
        (b"<html>\nnot found</html>", r"text that begins with b'<html>\\nnot found</html>', such as an error page, .*"),
    ],
)
def test_resolve_weights_other_file_names_its_kind(tmp_path, content, kind):
    (tmp_path / "w.pth.tar").write_bytes(content)
    with pytest.raises(InputError, match=rf"w.pth.tar' is {kind}, expected a file of torch\.save \(such as \.pth"):
        resolve_weights(str(tmp_path / "w.pth.tar"), ARCHITECTURE)


def several(state, *names: str) -> dict[str, object]:
    """A checkpoint with a set of weights under each name, of which only the biases differ, beside other values."""
    sets = {
        name: {f"module.{key}": value + number if key == "conv1.bias" else value for key, value in state.items()}
        for number, name in enumerate(names)
    }
    return {"epoch": 3, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "buffers": {"a": torch.zeros(2)}}, **sets}


@pytest.mark.parametrize(
    ("names", "usual"),
    [
        (("model_ema", "model"), 1),
        (("model", "model_ema"), 0),
        (("state_dict", "ema_state_dict"), 0),
        (("state_dict_ema", "model", "state_dict"), 2),
    ],
)
def test_resolve_weights_several_sets_uses_usual_or_named(tmp_path, state, names, usual):
    path = saved(tmp_path / "w.pth.tar", several(state, *names))
    for number, name in enumerate(names):
        found = resolve_weights(f"{path}#{name}", ARCHITECTURE)
        assert torch.equal(found.state["conv1.bias"], state["conv1.bias"] + number)
        assert f"using {name}:" in found.remark
    found = resolve_weights(path, ARCHITECTURE)
    assert torch.equal(found.state["conv1.bias"], state["conv1.bias"] + usual)
    others = " or ".join(f"{path}#{name}" for number, name in enumerate(names) if number != usual)
    assert found.remark == (
        f"the weights file {path!r} has {len(names)} sets of weights ({', '.join(names)}), using {names[usual]}: choose another "
        f"with --weights {others}"
    )
    for advised in others.split(" or "):
        assert not torch.equal(resolve_weights(advised, ARCHITECTURE).state["conv1.bias"], found.state["conv1.bias"])


def test_resolve_weights_several_unusual_sets_need_a_name(tmp_path, state):
    path = saved(tmp_path / "w.pth", several(state, "student", "teacher"))
    with pytest.raises(InputError, match=r"has 2 sets of weights, student, teacher: choose one, e\.g\. --weights .*#student"):
        resolve_weights(path, ARCHITECTURE)
    assert resolve_weights(f"{path}#teacher", ARCHITECTURE).remark.endswith(f"choose another with --weights {path}#student")
    with pytest.raises(InputError, match="has no set of weights 'other', but student, teacher: pass one of these after #"):
        resolve_weights(f"{path}#other", ARCHITECTURE)


@pytest.mark.parametrize("wrap", [lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}, lambda s: OrderedDict(s)])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_resolve_weights_removes_wrappers(tmp_path, state, wrap, prefix):
    content = wrap({prefix + name: value for name, value in state.items()})
    assert_same(resolve_weights(saved(tmp_path / "w.pth", content), ARCHITECTURE), state)


def test_resolve_weights_16_bit_file_is_widened(tmp_path, state):
    halves = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    found = resolve_weights(saved(tmp_path / "w.pth", halves), ARCHITECTURE)
    assert_same(found, {name: value.to(state[name].dtype) for name, value in halves.items()})
    assert {name: value.dtype for name, value in found.state.items()} == {name: value.dtype for name, value in state.items()}


def test_resolve_weights_missing_file_raises(tmp_path):
    with pytest.raises(InputError, match=f"^'{tmp_path}' is a folder, expected 'default', 'random:SEED'"):
        resolve_weights(str(tmp_path), ARCHITECTURE)
    with pytest.raises(InputError, match=r"there is no weights file 'random', .*: did you mean 'random:0'\?"):
        resolve_weights("random", ARCHITECTURE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv1.weight": None}, r"1 missing: conv1.weight\. These look like an unknown model's weights"),
        ({"conv1.bias": torch.zeros(5)}, r"1 of another shape: conv1.bias \[5\] for \[4\]\."),
        ({f"features.{i}.weight": torch.zeros(1) for i in range(35)}, r"35 unexpected: .*, …\. These look like VGG19 weights"),
    ],
)
def test_resolve_weights_other_model_raises_with_names(tmp_path, state, change, message):
    content = {name: value for name, value in (state | change).items() if value is not None}
    with pytest.raises(InputError, match=message):
        resolve_weights(saved(tmp_path / "w.pth", content), ARCHITECTURE)


def test_resolve_weights_nonfinite_values_raise(tmp_path, state):
    state["conv1.bias"][1] = np.nan
    with pytest.raises(InputError, match=r"non-finite values in conv1.bias: the file is corrupt; download it again"):
        resolve_weights(saved(tmp_path / "w.pth", state), ARCHITECTURE)


def test_resolve_weights_pickle_with_code_raises_without_running_it(tmp_path, state):
    request = saved(tmp_path / "w.pth", {"state_dict": state, "trap": Trap(tmp_path / "ran")})
    with pytest.raises(InputError, match=r"is refused: .*could run code when read .*save model\.state_dict\(\) alone"):
        resolve_weights(request, ARCHITECTURE)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("suffix", "kind"), [(".pth", "corrupt|is empty: download it again"), (".safetensors", "cannot be read as safetensors")]
)
@pytest.mark.parametrize("part", [0, 20, -1])
def test_resolve_weights_damaged_file_raises(tmp_path, state, suffix, kind, part):
    path = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    path.write_bytes(path.read_bytes()[:part])
    with pytest.raises(InputError, match=kind):
        resolve_weights(str(path), ARCHITECTURE)


@pytest.mark.parametrize(("content", "kind"), [([1], "a list"), ({"epoch": 1}, "a dict with 'epoch'")])
def test_resolve_weights_file_without_state_raises(tmp_path, content, kind):
    with pytest.raises(InputError, match=f"holds {kind}, expected names and tensors"):
        resolve_weights(saved(tmp_path / "w.pth", content), ARCHITECTURE)


def test_resolve_weights_refused_hash_raises(tmp_path, state):
    request = saved(tmp_path / "w.pth", state)
    prefix = hashlib.sha256(pathlib.Path(request).read_bytes()).hexdigest()[:8]
    with pytest.raises(InputError, match="are the wrong ones: they are of 2021"):
        resolve_weights(request, Architecture(build=build, default=DEFAULT, refused={prefix: "they are of 2021"}))


def offer(monkeypatch, tmp_path, state) -> Architecture:
    """Make an architecture whose default weights are "downloaded" from a file."""
    source = tmp_path / "source.pth"
    torch.save(state, source)
    prefix = hashlib.sha256(source.read_bytes()).hexdigest()[:8]
    default = PretrainedWeights("Tiny_Weights.V1", f"https://example.org/tiny-{prefix}.pth")

    def download(url, dst, hash_prefix=None, progress=True):
        assert (url, hash_prefix, progress) == (default.url, prefix, False)
        pathlib.Path(dst).write_bytes(source.read_bytes())

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    return Architecture(build=build, default=default)


def test_resolve_weights_default_downloads_once(monkeypatch, tmp_path, state):
    architecture = offer(monkeypatch, tmp_path, state)
    found = resolve_weights("default", architecture)
    assert_same(found, state)
    assert found.parameters() == {"weights": {"sha256": digest(state)}, "untrained": False}
    monkeypatch.setattr(torch.hub, "download_url_to_file", None)
    assert resolve_weights("default", architecture).parameters() == found.parameters()
    assert resolve_weights(str(tmp_path / "source.pth"), architecture).parameters() == found.parameters()
    save_file(state, tmp_path / "again.safetensors")
    assert resolve_weights(str(tmp_path / "again.safetensors"), architecture).parameters() == found.parameters()


def test_resolve_weights_damaged_cache_raises(monkeypatch, tmp_path, state):
    architecture = offer(monkeypatch, tmp_path, state)
    cached = tmp_path / "hub" / "checkpoints" / f"tiny-{architecture.hash_prefix}.pth"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"half")
    with pytest.raises(InputError, match=f"expected one that begins with {architecture.hash_prefix}: the file is corrupt"):
        resolve_weights("default", architecture)


@pytest.mark.parametrize("error", [urllib.error.URLError("no route"), RuntimeError("invalid hash value"), TimeoutError("slow")])
def test_resolve_weights_default_without_network_raises(monkeypatch, tmp_path, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(
        InputError, match=rf"cannot download .*Download {DEFAULT.url} elsewhere, and pass it with --weights PATH"
    ):
        resolve_weights("default", ARCHITECTURE)


def test_resolve_weights_random_equals_seeded_model():
    before = torch.random.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = build().state_dict()
    found = resolve_weights("random:7", ARCHITECTURE)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_same(found, expected)
    assert found.parameters() == {"weights": {"name": "random:7", "sha256": digest(expected)}, "untrained": True}
    assert resolve_weights("random:8", ARCHITECTURE).sha256 != found.sha256


@pytest.mark.parametrize("request_", ["random:", "random:x", "random:-1", "random:1.5", f"random:{2**63}"])
def test_resolve_weights_random_invalid_seed_raises(request_):
    with pytest.raises(UsageError, match="expected 'random:SEED' with an integer"):
        resolve_weights(request_, ARCHITECTURE)


def test_state_sha256_depends_on_name_type_shape_and_values(state):
    name = "conv1.bias"
    variants = [
        state,
        {("bias" if key == name else key): value for key, value in state.items()},
        state | {name: state[name].double()},
        state | {name: state[name].view(2, 2)},
        state | {name: state[name] + 1},
    ]
    assert len({state_sha256(variant) for variant in variants}) == len(variants)
    assert state_sha256(dict(reversed(state.items()))) == state_sha256(state)
