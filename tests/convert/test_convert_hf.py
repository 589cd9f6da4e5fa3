"""Folders to folders: every bit, valid files, resumed after a kill at any point, and every fault named at once."""

import json

import kills
import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.config.rules.checkpoint_files import checkpoint_problems
from moerl.convert.compare import compared
from moerl.convert.conversion import Conversion, convert
from moerl.convert.hf.hf_writing import WriteOptions
from moerl.convert.inspect import inspection, verify_digests
from moerl.convert.tensors import writing
from moerl.models.hf_checkpoint import INDEX, write_shards
from moerl.types.errors import ConvertError

CONFIG = {"model_type": "unheard_of", "torch_dtype": "bfloat16", "vocab_size": 70, "hidden_size": 200}


def model(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    matrices = {
        "model.embed_tokens.weight": (70, 200),
        **{f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight": (150, 200) for i in range(6)},
        **{f"model.layers.{i}.mlp.down_proj.weight": (200, 300) for i in range(6)},
        "model.norm.weight": (200,),
    }
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in matrices.items()}
    return tensors | {"model.layers.0.mlp.gate.e_score_correction_bias": torch.randn(8, generator=generator)}


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    write_shards(model().items(), directory, shard_bytes=200_000)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "generation_config.json").write_text('{"eos_token_id": 1}')
    return directory


def run(source, target, *, dry_run=False, shard_bytes=150_000, nonfinite="warn", **options):
    chosen = WriteOptions(shard_bytes=shard_bytes, nonfinite=nonfinite)
    return convert(Conversion(source=source, target=target, options=chosen, **options), dry_run=dry_run)


def tensors_of(directory):
    """As the files hold them."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def bytes_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_another_shard_size_keeps_every_bit(source, tmp_path):
    run(source, tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    assert found.keys() == model().keys()
    assert all(found[name].equal(tensor) and found[name].dtype == tensor.dtype for name, tensor in model().items())
    assert compared(source, tmp_path / "out", tolerance=0.0).is_equal
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((source / name).read_text())


def test_the_index_lists_what_the_files_hold_and_digests_verify(source, tmp_path):
    run(source, tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    held = {file.name: set(load_file(file)) for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(held) > 2
    assert {name: file for file, names in held.items() for name in names} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model().values())
    assert verify_digests(tmp_path / "out") == len(list((tmp_path / "out").iterdir())) - 1
    damaged = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    contents = bytearray(damaged.read_bytes())
    contents[-1] ^= 1
    damaged.write_bytes(contents)
    with pytest.raises(ConvertError, match=f"{damaged.name}.*is not what was written"):
        inspection(tmp_path / "out", verify=True)


def test_float32_becomes_bfloat16_but_the_bias_that_chooses_experts(tmp_path):
    directory = tmp_path / "wide"
    directory.mkdir()
    save_file(model(torch.float32), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float32"}))
    run(directory, tmp_path / "out", dtype="bfloat16")
    for name, tensor in model(torch.float32).items():
        expected = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        found = tensors_of(tmp_path / "out")[name]
        assert (found.dtype, bool(found.equal(expected))) == (expected.dtype, True), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
def test_fp8_and_back_and_again_is_the_same_fp8(scales, source, tmp_path):
    run(source, tmp_path / "fp8", dtype="fp8", scales=scales)
    held = tensors_of(tmp_path / "fp8")
    assert held["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert held["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 2)
    assert held["model.embed_tokens.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert (config["weight_block_size"], config.get("scale_fmt")) == ([128, 128], "ue8m0" if scales == "ue8m0" else None)
    run(tmp_path / "fp8", tmp_path / "plain", dtype="bfloat16")
    assert tensors_of(tmp_path / "plain").keys() == model().keys()
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    run(tmp_path / "plain", tmp_path / "again", dtype="fp8", scales=scales)
    assert compared(tmp_path / "fp8", tmp_path / "again", tolerance=0.0).is_equal
    assert not compared(source, tmp_path / "fp8", tolerance=0.0).is_equal


def test_scales_in_bfloat16_are_read(source, tmp_path):
    """As Qwen3's FP8 checkpoints have them."""
    run(source, tmp_path / "fp8", dtype="fp8", scales="ue8m0", shard_bytes=10**9)
    run(tmp_path / "fp8", tmp_path / "plain", dtype="bfloat16")
    held = tensors_of(tmp_path / "fp8")
    narrow = {name: tensor.bfloat16() if name.endswith("_scale_inv") else tensor for name, tensor in held.items()}
    save_file(narrow, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "fp8", tmp_path / "narrow", dtype="bfloat16")
    assert compared(tmp_path / "plain", tmp_path / "narrow", tolerance=0.0).is_equal


def test_a_dry_run_writes_nothing_and_counts_the_bytes(source, tmp_path):
    text = run(source, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists() and not writing.partial_of(tmp_path / "out").exists()
    run(source, tmp_path / "out")
    total = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert f"({total} bytes)" in text and "GB of disk" in text


def conversion(source, target, workers=1):
    return Conversion(source=source, target=target, options=WriteOptions(shard_bytes=150_000, workers=workers))


def kill_after(share, source, target, workers=1):
    """After that share of its operations on files."""
    moments = kills.count_moments(conversion(source, target.with_name(f"{target.name}-counted"), workers))
    assert moments > 50
    assert not kills.kill_at(int(share * moments), conversion(source, target, workers))


@pytest.mark.parametrize(
    ("share", "workers"), [(0.02, 1), (0.05, 1), (0.1, 1), (0.2, 2), (0.3, 1), (0.5, 2), (0.65, 1), (0.8, 1), (0.95, 2)]
)
def test_a_killed_conversion_goes_on_to_the_same_bytes(share, workers, source, tmp_path):
    run(source, tmp_path / "straight")
    target = tmp_path / "out"
    kill_after(share, source, target, workers)
    assert not target.exists()
    partial = writing.partial_of(target)
    kept = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
    file = partial / "journal.jsonl"
    journal = [json.loads(line)["name"] for line in file.read_text().splitlines()] if file.exists() else []
    run(source, target)
    assert bytes_of(target) == bytes_of(tmp_path / "straight")
    assert not partial.exists()
    assert all((target / name).stat().st_ino == kept[name] for name in journal)
    assert share < 0.6 or len(journal) > 1


def test_a_finished_file_that_was_damaged_meanwhile_is_written_again(source, tmp_path):
    run(source, tmp_path / "straight")
    kill_after(0.65, source, tmp_path / "out")
    first = sorted(writing.partial_of(tmp_path / "out").glob("*.safetensors"))[0]
    first.write_bytes(b"x" * first.stat().st_size)
    run(source, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")


def test_another_source_or_setting_does_not_go_on_with_the_files_of_an_interrupted_run(source, tmp_path):
    kill_after(0.65, source, tmp_path / "out")
    with pytest.raises(ConvertError, match="was begun with another plan"):
        run(source, tmp_path / "out", dtype="float32")
    (source / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 71}))
    with pytest.raises(ConvertError, match="was begun with another plan"):
        run(source, tmp_path / "out")


# -- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [INDEX, "model.safetensors"])
def test_a_folder_without_a_tensor_is_no_checkpoint(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "of_somebody"}')
    (tmp_path / "empty" / name).write_bytes(b"{}" if name == INDEX else b"\x02" + bytes(7) + b"{}")
    with pytest.raises(ConvertError, match="needs a weight_map" if name == INDEX else "has no weights"):
        run(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_absent_truncated_and_broken_file_is_listed_at_once(source, tmp_path):
    files = sorted(source.glob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-10])
    files[2].write_bytes(b"12")
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["promised.weight"] = files[3].name
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConvertError) as caught:
        run(source, tmp_path / "out")
    text = str(caught.value)
    for fragment in (f"{files[0]}': is absent", "truncated", "too few for its header", "promised.weight': is missing"):
        assert fragment in text
    assert len(caught.value.problems) == 4
    assert not writing.partial_of(tmp_path / "out").exists()


def test_a_target_with_files_is_not_overwritten(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("mine")
    with pytest.raises(ConvertError, match="must not exist, or be an empty directory"):
        run(source, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == {"kept": b"mine"}


def test_a_full_disk_is_noticed_before_writing(source, tmp_path, monkeypatch):
    usage = writing.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(ConvertError, match=r"the disk has 0.00 GB free"):
        run(source, tmp_path / "out")
    assert not list(writing.partial_of(tmp_path / "out").glob("*.safetensors*"))


def test_values_that_are_not_finite_are_counted_by_tensor(source, tmp_path, caplog):
    bad = model()
    bad["model.norm.weight"][:3] = torch.nan
    bad["model.layers.2.mlp.down_proj.weight"][0, 0] = -torch.inf
    write_shards(bad.items(), source, shard_bytes=200_000)
    with pytest.raises(ConvertError) as caught:
        run(source, tmp_path / "out", nonfinite="error")
    assert [(each.value, each.rule) for each in caught.value.problems] == [
        ("model.layers.2.mlp.down_proj.weight", "holds 1 values that are not finite"),
        ("model.norm.weight", "holds 3 values that are not finite"),
    ]
    assert not (tmp_path / "out").exists()
    run(source, tmp_path / "warned")
    assert "model.norm.weight holds 3 values" in caplog.text
    assert (tmp_path / "warned").exists()


def test_scales_that_do_not_fit_their_weights_are_all_listed(source, tmp_path):
    run(source, tmp_path / "fp8", dtype="fp8", shard_bytes=10**9)
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
    tensors["model.layers.1.mlp.down_proj.weight_scale_inv"] = torch.ones(1, 3)
    tensors["stray.weight_scale_inv"] = torch.ones(1)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(ConvertError) as caught:
        run(tmp_path / "fp8", tmp_path / "plain", dtype="bfloat16")
    text = str(caught.value)
    assert "needs model.layers.0.mlp.down_proj.weight_scale_inv" in text
    assert "must have shape (2, 3)" in text and "found (1, 3)" in text
    assert "stray.weight_scale_inv': has no FP8 weight" in text


@pytest.mark.parametrize("file", [None, "hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_another_form_of_fp8_is_one_problem_and_not_one_of_each_tensor(file, tmp_path):
    """Of a scale for each row, or for the whole tensor, which config.json or a file beside it tells."""
    weights = {f"{index}.weight": torch.zeros(200, 300).to(torch.float8_e4m3fn) for index in range(3)}
    tensors = weights | {f"{name}_scale": torch.ones(1) for name in weights}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}} if file is None else {}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | quantization))
    if file is not None:
        (tmp_path / file).write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ConvertError) as caught:
        run(tmp_path, tmp_path / "out", dtype="bfloat16")
    assert [each.fix for each in caught.value.problems] == ["the unquantized checkpoint"]


def test_the_command_line_exits_with_2_for_problems_and_1_for_differences(moerl, source, tmp_path):
    refused = moerl("convert", tmp_path / "absent", tmp_path / "out")
    assert refused.returncode == 2 and "is no directory" in refused.stderr
    assert moerl("convert", source, tmp_path / "out", "--dtype", "fp8").returncode == 0
    different = moerl("compare", source, tmp_path / "out")
    assert different.returncode == 1 and "14 tensors are equal" not in different.stdout
    assert moerl("compare", source, tmp_path / "out", "--tolerance", "1").returncode == 0
    assert "total float8_e4m3fn: 12 tensors" in moerl("inspect", tmp_path / "out").stdout


def test_totals_of_an_inspection_are_elements_because_scales_and_moments_are_no_parameters(source, tmp_path):
    run(source, tmp_path / "out", dtype="fp8")
    held, parameters = tensors_of(tmp_path / "out"), sum(tensor.numel() for tensor in model().values())
    numel = sum(tensor.numel() for tensor in held.values())
    assert numel > parameters and f", {numel} elements, " in inspection(tmp_path / "out", verify=False).splitlines()[-1]


def test_different_integers_differ_and_tensors_without_elements_compare(tmp_path):
    """Between 2^53 and 2^53 + 1 float64 knows no difference."""
    for name, number in (("a", 2**53), ("b", 2**53 + 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "of_others"}')
        tensors = {"empty": torch.zeros(0, 4), "packed": torch.tensor([number, 5])}
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    assert compared(tmp_path / "a", tmp_path / "a", tolerance=0.0).is_equal
    comparison = compared(tmp_path / "a", tmp_path / "b", tolerance=0.0)
    assert comparison.differences == {"packed": "largest difference 1"}
    assert comparison.num_equal == 1


def test_unsigned_integers_of_every_size_are_copied_and_compared(tmp_path):
    """Packed weights are uint32 in folders of MLX, whose architecture may be anybody's."""
    for name, dtype in (("src", torch.uint32), ("wide", torch.int64)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "of_others"}')
        tensors = {"packed": torch.tensor([1, 2**32 - 1]).to(dtype), "w": torch.ones(2)}
        tensors |= {"u16": torch.tensor([2**16 - 1], dtype=torch.uint16), "u64": torch.tensor([2**64 - 1], dtype=torch.uint64)}
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "src", tmp_path / "out", dtype="bfloat16")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert held["packed"].dtype == torch.uint32 and held["packed"].tolist() == [1, 2**32 - 1] and held["w"].dtype == torch.bfloat16
    assert held["u16"].tolist() == [2**16 - 1] and held["u64"].tolist() == [2**64 - 1]
    assert compared(tmp_path / "src", tmp_path / "wide", tolerance=0.0).is_equal


def test_a_model_saved_over_one_of_several_files_is_refused_with_what_it_left(tmp_path):
    """transformers removes the older files and leaves their index; it reads model.safetensors, whether or not those are there."""
    write_shards([(f"w{index}", torch.ones(8)) for index in range(3)], tmp_path, shard_bytes=32)
    (tmp_path / "config.json").write_text('{"model_type": "of_others"}')
    save_file({"w0": torch.zeros(8)}, tmp_path / "model.safetensors")
    rule, fix = (
        "must not have model.safetensors beside an index of other files",
        "remove the index, or model.safetensors, whichever is older",
    )
    for _ in range(2):
        with pytest.raises(ConvertError) as raised:
            convert(Conversion(source=tmp_path, target=tmp_path / "out"), dry_run=True)
        assert [(each.rule, each.fix) for each in raised.value.problems] == [(rule, fix)]
        assert [(each.rule, each.fix) for each in checkpoint_problems(tmp_path)][-1] == (rule, fix)
        for shard in tmp_path.glob("model-*.safetensors"):
            shard.unlink()
    (tmp_path / INDEX).unlink()
    assert convert(Conversion(source=tmp_path, target=tmp_path / "out"), dry_run=True).startswith("would write")


def test_every_chat_template_and_the_notice_go_along(source, tmp_path):
    """Where transformers writes them: the templates beside the default one in a folder of their own."""
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "NOTICE").write_text("of the licence")
    said = run(source, tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert (tmp_path / "out" / "NOTICE").read_text() == "of the licence"
    assert "additional_chat_templates/tool_use.jinja" in said
    assert "additional_chat_templates/tool_use.jinja" in (tmp_path / "out" / writing.DIGESTS).read_text()


def test_files_that_are_links_out_of_the_folder_are_not_carried(source, tmp_path):
    """A model that somebody cloned could bring one to a key, which would be published with what is written."""
    (tmp_path / "key").write_text("private")
    (source / "LICENSE").symlink_to(tmp_path / "key")
    with pytest.raises(ConvertError, match=r"LICENSE = \'.*/key\': must be no link out of .*/source\n"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (tmp_path / "key").rename(cache / "blobs" / "1")
    (source / "LICENSE").unlink()
    (source / "LICENSE").symlink_to("../../blobs/1")
    (cache / "snapshots").mkdir()
    run(source.rename(cache / "snapshots" / "0"), tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "private"


def test_a_folder_of_another_format_is_one_problem_that_names_the_checkpoint_below_it(tmp_path):
    def refused():
        with pytest.raises(ConvertError) as raised:
            convert(Conversion(source=tmp_path, target=tmp_path / "out", files_from=tmp_path), dry_run=True)
        (problem,) = raised.value.problems
        assert (problem.value, problem.rule) == (str(tmp_path), "holds no checkpoint")
        return problem.fix

    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert refused() == "the folder that has them"
    weights = tmp_path / "policy" / "weights" / "iter_0000000"
    weights.mkdir(parents=True)
    (weights / ".metadata").touch()
    assert refused() == str(weights)


def test_weights_without_config_json_and_index_are_no_other_format(tmp_path):
    """As of a folder that was fetched in part."""
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ConvertError) as raised:
        convert(Conversion(source=tmp_path, target=tmp_path / "out"), dry_run=True)
    assert [problem.value for problem in raised.value.problems] == [f"{tmp_path}/config.json", str(tmp_path)]


def test_a_value_that_float16_has_no_room_for_is_not_called_a_fault_of_the_source_alone(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "config.json").write_text('{"model_type": "of_others"}')
    save_file({"w": torch.tensor([1e6, 1.0])}, tmp_path / "src" / "model.safetensors", metadata={"format": "pt"})
    options = WriteOptions(nonfinite="error")
    with pytest.raises(ConvertError, match="--dtype bfloat16 if float16, which ends at 65504, alone has no room"):
        convert(Conversion(source=tmp_path / "src", target=tmp_path / "out", dtype="float16", options=options), dry_run=False)
    convert(Conversion(source=tmp_path / "src", target=tmp_path / "wide", dtype="bfloat16", options=options), dry_run=False)
