"""The rooflines of a step as a file, as text and as a picture, and what they say of single operators."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from strop.cli import main
from strop.hardware.flops import decoding_flops
from strop.hardware.model_dimensions import DecoderDimensions, LayerDimensions
from strop.monitoring.pages.roofline_drawing import draw_figure, draw_rooflines
from strop.monitoring.roofline.decode_work import DecodeWork
from strop.monitoring.roofline.roofline_text import format_rate, format_roofline, summarize_roofline
from strop.monitoring.roofline.step_roofline import (
    ProcessRoofline,
    count_decode,
    find_place,
    list_rooflines,
    read_roofline,
    roofline_path,
    write_roofline,
)
from support.step_rooflines import CEILINGS, DRIVER, FORWARD, PRODUCT, STEP, SUM, VIEWS


def test_a_place_says_how_far_the_roof_is_and_what_it_is_made_of() -> None:
    place = find_place(PRODUCT, CEILINGS)
    assert (place.intensity, place.rate, place.share, place.bound) == (150, 75e9, 0.75, "compute")
    assert find_place(SUM, CEILINGS).bound == "memory" and find_place(SUM, CEILINGS).share == pytest.approx(0.4)
    assert find_place(replace(SUM, seconds=0.1), CEILINGS).bound == "cache"
    assert find_place(replace(SUM, calls=10**6), CEILINGS).bound == "small calls"
    assert find_place(VIEWS, CEILINGS).bound == "" and find_place(PRODUCT, None).bound == ""
    assert find_place(replace(PRODUCT, precision="bfloat16"), CEILINGS).share == 0.375


def test_a_file_is_read_as_it_was_written_and_a_damaged_one_is_a_sentence(tmp_path: Path) -> None:
    path = roofline_path(tmp_path, 3)
    write_roofline(path, STEP)
    assert read_roofline(path) == STEP and list_rooflines(tmp_path) == [3]
    values = json.loads(path.read_text())
    values["processes"][0]["rows"][0]["added_later"] = 1
    path.write_text(json.dumps(values))
    assert read_roofline(path) == STEP
    for wrong in ("{", "[]", '{"version": 1}', '{"version": 9}', json.dumps({**values, "processes": [{"name": 1}]})):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"damaged|another version"):
            read_roofline(path)


def test_the_tables_say_where_time_goes() -> None:
    text = format_roofline(STEP, 20)
    assert "P: 200 GFLOP/s in bfloat16, 100 GFLOP/s in float32, memory 10 GB/s, cache 40 GB/s (made up)" in text
    assert "operators: 3.5 s of the step's 5 s; matrix products 57 %, reductions 29 %, views and dispatch 14 %" in text
    assert "outside of torch's operators: 0.25 s of forward" in text
    assert "engine-0: not recorded: it was started during the step" in text
    row = next(line for line in text.splitlines() if line.startswith("mm ["))
    assert " ".join(row.split()) == "mm [8, 8] x [8, 8] forward 4 2 57.1 % 75 G 500 M 150 75 % compute"
    assert summarize_roofline(STEP) == "driver: matrix products are 57 % of the operators' 3.5 s at 75 % of the roof"
    assert summarize_roofline(replace(STEP, processes=[ProcessRoofline()])) == "no operator was recorded"
    assert [format_rate(value) for value in (0, 950, 12e3, 999.99e9, 3e15)] == ["0 ", "950 ", "12 k", "1 T", "3 P"]


def test_decoding_is_counted_from_the_model() -> None:
    layer = LayerDimensions(attention=400, mlp=600, resident=600, query_width=8, value_width=8, cache_width=16)
    model = DecoderDimensions(hidden=10, vocabulary=50, tied=True, layers=(layer, layer))
    work = DecodeWork(model=model, itemsize=2, precision="bfloat16")
    assert work.count_flops(5, 11 + 12 + 13 + 14 + 15) == decoding_flops(model, prompt=10, tokens=5)
    assert work.count_bytes(5, 5, 65) == 2 * (5 * (2000 + 500) + 65 * 32 + 5 * 32)
    decode = count_decode(DRIVER, work).passes[1]
    assert decode.of_model and decode.flops == work.count_flops(40, 4000) and decode.precision == "bfloat16"
    assert count_decode(DRIVER, None) is DRIVER and count_decode(DRIVER, work).passes[0] == FORWARD
    text = format_roofline(replace(STEP, processes=[count_decode(DRIVER, work)]), 5)
    assert "decode: 80 tokens/s, 4.0 sequences a step, 7.71 kB of weights and cache a token" in text


def test_experts_and_windows_limit_what_a_step_reads() -> None:
    layer = LayerDimensions(attention=0, mlp=100, resident=800, query_width=8, value_width=8, cache_width=16, window=4)
    model = DecoderDimensions(hidden=1, vocabulary=1, tied=True, layers=(layer,))
    work = DecodeWork(model=model, itemsize=1, precision="bfloat16")
    assert work.count_bytes(1, 2, 0) == 1 + 200 + 2 * 16 and work.count_bytes(1, 100, 0) == 1 + 800 + 100 * 16
    assert work.count_bytes(1, 2, 1000) == 1 + 200 + 2 * 4 * 16 + 2 * 16


def test_the_picture_is_well_formed_and_a_name_cannot_be_markup() -> None:
    hostile = replace(
        STEP, processes=[replace(DRIVER, name="<script>alert(1)</script>", rows=[replace(PRODUCT, name="</text><b>")])]
    )
    for found in (STEP, hostile, replace(STEP, processes=[replace(DRIVER, ceilings=None)]), replace(STEP, processes=[])):
        root = ElementTree.fromstring(draw_rooflines(found))
        assert not [each for each in root.iter() if each.tag.rpartition("}")[2] in ("script", "b")]
    texts = [each.text for each in ElementTree.fromstring(draw_rooflines(STEP)).iter() if each.tag.endswith("text")]
    assert "float32 100 GFLOP/s" in texts and "memory 10 GB/s" in texts and "cache 40 GB/s" in texts
    assert 'role="img"' in draw_figure(DRIVER, "a") and draw_figure(replace(DRIVER, rows=[VIEWS]), "a") == ""


def test_the_command_prints_the_last_recorded_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "profiles").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    assert main(["roofline", str(run)]) == 2 and "has no rooflines; record some" in capsys.readouterr().err
    path = roofline_path(run / "profiles", 3)
    write_roofline(path, STEP)
    path.with_suffix(".svg").write_text(draw_rooflines(STEP))
    assert main(["roofline", str(run), "--rows", "1", "--picture", str(tmp_path / "x.svg")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 3: 5 s\n") and "mm [8, 8]" in out and "sum (reductions)" not in out
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    assert main(["roofline", str(run), "--json"]) == 0 and json.loads(capsys.readouterr().out)["step"] == 3
    assert main(["roofline", str(run), "--step", "9"]) == 2 and "step 9 has no roofline; found 3" in capsys.readouterr().err
    path.write_text("{")
    assert main(["roofline", str(run)]) == 2 and "is damaged" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["roofline", str(run), "--rows", "0"])
    assert main(["roofline", str(tmp_path / "none")]) == 2
