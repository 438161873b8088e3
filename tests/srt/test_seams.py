"""Every seam exists in the installed SGLang, and a missing one is named."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_c2t.srt import attach, compat, probes, seams, versions
from sglang_c2t.srt.versions import TESTED


def test_seams_fit_the_installed_sglang() -> None:
    assert seams.broken_seams() == []


@pytest.mark.skipif(versions.installed() != TESTED[-1], reason="older ones are refused")
def test_seams_of_optional_features_fit_the_newest_sglang() -> None:
    optional = (*seams.DATA_PARALLEL_SEAMS, *seams.ADAPTER_SEAMS)
    assert seams.broken_seams(optional) == []


@pytest.mark.parametrize(
    ("seam", "said"),
    [
        (("sglang.srt.no_such_module.thing", ""), "not found"),
        (("sglang.srt.server_args.ServerArgs.no_such_method", ""), "not found"),
        (("sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify", "", "batch x"),
         "lacks the parameters ['x']"),
        (("sglang.srt.managers.utils.GenerationBatchResult", "", "", "cap_lens y"),
         "lacks the fields ['y']"),
    ],
)  # fmt: skip
def test_seam_without_symbol_parameter_or_field_is_a_defect(seam: Any, said: str) -> None:
    """A renamed argument breaks us as surely as a renamed function."""
    assert said in str(probes.Seam(*seam).defect())


def test_seam_in_a_module_that_cannot_be_imported_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is not installed is no seam that moved."""
    package = tmp_path / "half_there"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "worker.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    defect = str(probes.Seam("half_there.worker.Worker", "works").defect())
    assert "half_there.worker cannot be imported: No module named 'a_package_that" in defect
    assert "has no attribute 'rest'" in str(probes.Seam("half_there.rest.Rest", "rests").defect())


def all_seams() -> list[probes.Seam]:
    """As this SGLang offers them, those that hold nothing here left out."""
    optional = (*seams.ADAPTER_SEAMS, *seams.DATA_PARALLEL_SEAMS)
    there = [seam for seam in optional if seam.defect() is None]
    chosen = [seam.chosen() for seam in (*seams.SEAMS, *seams.CPU_SEAMS, *there)]
    return [
        dataclasses.replace(seam, otherwise=None)
        for seam in chosen
        if not seam.needs or probes.module_exists(seam.needs)
        if not seam.on_gpu or torch.cuda.is_available()
        if not seam.if_imported
    ]


def test_seam_on_gpu_is_probed_on_a_gpu_only(monkeypatch) -> None:
    """Ours are found by the servers of tests/emulated."""
    assert any(seam.on_gpu for seam in seams.SEAMS)
    seam = probes.Seam("sglang.srt.no_such_module.thing", "does it", on_gpu=True)
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert (seam.defect() is not None) == there


def named(seam: probes.Seam) -> str:
    return f"{seam.target.removeprefix('sglang.srt.')}-{seam.use}"


def owners_of(target: str) -> tuple[list[Any], str]:
    """Where a dotted name stands: the module, or the class and those it is inherited from."""
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    bases = owner.__mro__ if isinstance(owner, type) else (owner,)
    return [base for base in bases if name in vars(base) and base is not object], name


def refused(seam: probes.Seam) -> bool:
    """Whether a start is refused in a sentence that names the seam and what it is for."""
    with pytest.raises(probes.SeamError) as error:
        seams.require_seams((seam,))
    return seam.target in str(error.value) and seam.use in str(error.value)


@pytest.mark.parametrize("seam", all_seams(), ids=named)
def test_seam_with_any_renamed_part_refuses_the_start(
    seam: probes.Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its symbol, each parameter and each attribute."""
    found = pkgutil.resolve_name(seam.target)
    owners, name = owners_of(seam.target)
    with monkeypatch.context() as patch:
        for owner in owners:
            patch.delattr(owner, name)
        assert name == "__init__" or refused(seam)  # no class is without
    for parameter in seam.parameters.split():
        others = [p for p in probes.parameters_of(found) if p != parameter]
        with monkeypatch.context() as patch:
            patch.setattr(probes, "parameters_of", _instead(probes.parameters_of, found, others))
            assert refused(seam)
    for field in seam.fields.split():
        others = list(probes.attribute_names(found) - {field})
        with monkeypatch.context() as patch:
            names = _instead(probes.attribute_names, found, others)
            patch.setattr(probes, "attribute_names", names)
            assert refused(seam)


def _instead(function: Any, of: Any, answer: list[str]) -> Any:
    return lambda asked: set(answer) if asked == of else function(asked)


class Base:
    """Has an attribute of the class, and one that a method gives it."""

    on_class = 1

    def __init__(self) -> None:
        self.in_init = self.on_class
        (self.left, _), other = (1, 2), self
        other.not_its_own = 3


class Derived(Base):
    annotated: int

    def later(this) -> None:
        this.in_method: int = 4


def test_attribute_names_hold_what_a_class_gives_its_instances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the test of every seam above would prove little."""
    source = inspect.getsource(Base) + inspect.getsource(Derived)
    for cls in (Base, Derived):
        monkeypatch.setattr(cls, "__module__", "sglang_c2t.imagined")
    real = probes._assignments.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", lambda name: name)
        patch.setattr(inspect, "getsource", lambda module: source)
        assignments = real("sglang_c2t.imagined")
    monkeypatch.setattr(probes, "_assignments", lambda module: assignments)
    names = probes.attribute_names.__wrapped__(Derived)
    assert {"on_class", "in_init", "left", "in_method", "later"} <= names
    assert not {"not_its_own", "annotated", "other"} & names


def test_attribute_names_hold_fields_of_a_dataclass() -> None:
    assert {"prepared_out_cache_loc", "kv_loc_plan"} <= probes.attribute_names(NewVerifyInput)


def test_attach_write_of_an_unknown_attribute_is_refused() -> None:
    """SGLang would not read it."""
    old = OldVerifyInput()
    with pytest.raises(probes.SeamError, match="no kv_loc_plan on OldVerifyInput; C2T needs it"):
        attach.write(old, kv_loc_plan=None)
    assert not vars(old)
    with pytest.raises(probes.SeamError, match="C2T needs it for verification of packed rows"):
        attach.swapped(old, "kv_loc_plan", 1).__enter__()
    new = NewVerifyInput()
    attach.write(new, kv_loc_plan="ours")
    assert new.kv_loc_plan == "ours"


# -- every write is listed ----------------------------------------------------------------

ROOT = Path(compat.__file__).parents[2]
PACKAGE = Path(compat.__file__).parents[1]
SOURCES = sorted(Path(compat.__file__).parent.rglob("*.py"))

#: Names that hold objects of ours in these sources, or copies made for a call.
OURS = {
    "self",
    "self._draft_worker",
    "COUNTERS",
    "CONTROL",
    "RECORDING",
    "wrapped",
    "group",
    "parser",
}


@functools.cache
def listed() -> set[str]:
    """Every name of a symbol or attribute in the list of seams."""
    found = set()
    for seam in itertools.chain.from_iterable(seams.GROUPS.values()):
        each: probes.Seam | None = seam
        while each is not None:
            found |= {*each.fields.split(), each.target.rpartition(".")[2]}
            each = each.otherwise
    return found


def written_names(source: str) -> set[str]:
    """Attributes written to objects that are not ours: assigned, or by :mod:`attach`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) not in OURS:
                found.add(node.attr)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).removeprefix("attach.")
            if called == "write":
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
            elif called in ("swapped", "wrap_global", "setattr"):
                name = node.args[1]
                if isinstance(name, ast.Constant) and not ast.unparse(node.args[0]).startswith(
                    "self.gate"
                ):
                    found.add(str(name.value))
    return found


#: Attributes of our own, on objects of ours that have no name of their own above.
OWN = {
    "__class__", "_on_forward", "accepted", "capturing", "draft_input", "end", "forwarded_rows",
    "extends", "forwards", "outcome", "packing", "plan", "selected", "tpot_ms", "verify",
}  # fmt: skip


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_seams_list_every_attribute_of_sglang_that_is_written(path: Path) -> None:
    foreign = {n for n in written_names(path.read_text()) if not n.startswith("c2t_")}
    assert foreign - OWN <= listed()


def our_classes() -> list[type]:
    """Those with a base class of SGLang."""
    found = []
    for path in SOURCES:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == module.__name__:
                found += [cls] if foreign_bases(cls) else []
    return found


def foreign_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] == "sglang"]


def test_seams_list_what_our_classes_override() -> None:
    """An attribute of ours that SGLang comes to use itself is found here as well."""
    classes = our_classes()
    assert {cls.__name__ for cls in classes} >= {"C2TEagleWorker", "RaggedFlashInferBackend"}
    for cls in classes:
        theirs = frozenset[str]().union(*map(probes.attribute_names, foreign_bases(cls)))
        ours = [base for base in cls.__mro__ if base.__module__.startswith("sglang_c2t")]
        written = frozenset[str]().union(
            *map(probes._assigned, ours),
            *({n for n in vars(base) if not n.startswith("__")} for base in ours),
        )
        assert (written & theirs) - OWN - {"_abc_impl"} <= listed(), cls


#: Probed for what its being there says, not called.
PROBED_ONLY = {"check_lora_speculative_compatibility"}


def test_seam_without_a_user_is_not_probed() -> None:
    """It would refuse a start for nothing. A user reads its name, its hook's label, one of its
    parameters or a field.
    """
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", sources)) | PROBED_ONLY
    unused = [
        seam.target
        for seam in all_seams()
        if not {seam.hook, seam.target.rpartition(".")[2], *seam.parameters.split()} & words
        and not set(seam.fields.split()) & words
    ]
    assert unused == []
    read_only_here = [
        (seam.target, field)
        for seam in all_seams()
        for field in seam.fields.split()
        if field not in words
    ]
    assert read_only_here == []


def test_seam_table_line_that_is_no_seam_is_refused() -> None:
    groups = seams.parse("[main: a test]\nhook look a.b (c d) {e}\n  or a.f needs g on_gpu\n")
    (seam,) = groups["main"]
    assert (seam.hook, seam.target, seam.parameters, seam.fields) == ("look", "a.b", "c d", "e")
    assert seam.otherwise == probes.Seam("a.f", "a test", needs="g", on_gpu=True)
    with pytest.raises(ValueError, match=r"no seam: 'a\.b \(c'"):
        seams.parse("[main: a test]\na.b (c\n")


def test_seam_with_two_places_fits_where_one_is_there() -> None:
    """A seam of another release may replace a missing one; without both SGLang is refused."""
    here = probes.Seam("sglang.srt.server_args.ServerArgs", "test")
    gone = probes.Seam("sglang.srt.server_args.NoSuchClass", "test")
    either = dataclasses.replace(gone, otherwise=here)
    assert either.defect() is None
    assert either.chosen() is here
    assert dataclasses.replace(here, otherwise=gone).chosen().target == here.target
    neither = dataclasses.replace(gone, otherwise=dataclasses.replace(gone, target="sglang.none"))
    assert neither.chosen() is neither
    defect = neither.defect()
    assert defect is not None
    assert "NoSuchClass" in defect
    assert "nor sglang.none: not found" in defect


@dataclasses.dataclass
class NewVerifyInput:
    """Says itself where its rows are written."""

    prepared_out_cache_loc: Tensor | None = None
    kv_loc_plan: object | None = "the full window"


@dataclasses.dataclass
class OldVerifyInput:
    """Leaves that to a function that SGLang looks up when it verifies."""


def bind_rows(verify_input: NewVerifyInput | OldVerifyInput) -> Tensor:
    """As SGLang does in ``eagle_prepare_for_verify``."""
    if isinstance(verify_input, NewVerifyInput):
        assert verify_input.kv_loc_plan is None
        assert verify_input.prepared_out_cache_loc is not None
        return verify_input.prepared_out_cache_loc
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func

    return assign_extend_cache_locs_uniform_func(req_pool_indices=None, draft_token_num=6)


@pytest.mark.parametrize("kind", [NewVerifyInput, OldVerifyInput])
def test_writing_rows_binds_packed_rows_to_their_slots(kind: type) -> None:
    locs = torch.tensor([7, 3, 9])
    verify_input = kind()
    with compat.writing_rows(verify_input, locs):
        assert bind_rows(verify_input) is locs


def test_writing_rows_refuses_rows_bound_by_other_means() -> None:
    """They would be written to the slots of other rows."""
    with (
        pytest.raises(AssertionError, match="bound the rows to verify without"),
        compat.writing_rows(OldVerifyInput(), torch.tensor([7])),
    ):
        pass


def test_writing_rows_ignores_bindings_of_an_earlier_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.5.20 imports what binds them once, and would keep ours as well."""
    from sglang.srt.speculative import eagle_utils

    monkeypatch.setattr(eagle_utils, "_PREPARE_FOR_VERIFY_DEPS", "theirs", raising=False)
    locs = torch.tensor([7])
    with compat.writing_rows(OldVerifyInput(), locs):
        assert eagle_utils._PREPARE_FOR_VERIFY_DEPS is None
        monkeypatch.setattr(eagle_utils, "_PREPARE_FOR_VERIFY_DEPS", "ours")
        assert bind_rows(OldVerifyInput()) is locs
    assert eagle_utils._PREPARE_FOR_VERIFY_DEPS == "theirs"


def test_hook_target_is_the_newest_function_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    here, older = "sglang.srt.server_args.ServerArgs", "sglang.srt.server_args.PortArgs"
    for places in ((here, older), ("sglang.srt.no_such.step", here, older)):
        table = "\n  or ".join(f"hook step {place}" for place in places)
        monkeypatch.setattr(seams, "GROUPS", seams.parse(f"[main: a test]\n{table}\n"))
        assert seams.hook_targets("step") == [here]
    with pytest.raises(KeyError, match="no hook stride"):
        seams.hook_targets("stride")


def test_compat_translates_slots_where_the_kv_pool_says_so() -> None:
    """0.5.19 says it by another name, and older ones have nothing that could."""
    assert not compat.translates_slots(SimpleNamespace())
    for name in ("is_translating", "reads_are_translated"):
        for said in (True, False):
            translator = SimpleNamespace(**{name: said})
            backend = SimpleNamespace(kv_index_translator=translator)
            assert compat.translates_slots(backend) == said
    deferred = SimpleNamespace(is_translating=True, reads_are_translated=False)
    assert not compat.translates_slots(SimpleNamespace(kv_index_translator=deferred))


def test_compat_output_stride_is_set_in_the_existing_field() -> None:
    new = SimpleNamespace(speculative_output_stride=None, speculative_num_draft_tokens=28)
    compat.set_output_stride(new, 6)
    assert (new.speculative_output_stride, new.speculative_num_draft_tokens) == (6, 28)
    old = SimpleNamespace(speculative_num_draft_tokens=28)
    compat.set_output_stride(old, 6)
    assert vars(old) == {"speculative_num_draft_tokens": 6}


def test_compat_dp_rank_of_the_runner_or_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer SGLang keeps it for the process, ``None`` where there is one replica."""
    assert compat.dp_rank(SimpleNamespace(ps=SimpleNamespace(dp_rank=1))) == 1
    for told, rank in ((None, 0), (2, 2)):
        parallel = SimpleNamespace(dp_rank=told)
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda of=parallel: of)
        assert compat.dp_rank(SimpleNamespace()) == rank


def test_compat_dp_attention_by_size_or_flag() -> None:
    """The flag is older than the size; an SGLang that has neither is not "off"."""
    assert compat.uses_dp_attention(SimpleNamespace(attn_dp_size=2))
    assert not compat.uses_dp_attention(SimpleNamespace(attn_dp_size=1, enable_dp_attention=False))
    assert compat.uses_dp_attention(SimpleNamespace(enable_dp_attention=True))
    with pytest.raises(probes.SeamError, match="no server argument enable_dp_attention"):
        compat.uses_dp_attention(SimpleNamespace())
