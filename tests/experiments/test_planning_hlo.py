"""A compiled program, read: bytes moved by its instructions, collectives by their groups."""

import jax
import pytest

from experiments.planning.counting import Sent
from experiments.planning.hlo import parse
from experiments.planning.partitioned import sent
from experiments.planning.traffic import moved, trips

PROGRAM = """HloModule made

%slice (p0: f32[6,100], p1: s32[]) -> f32[100] {
  %p0 = f32[6,100]{1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,100}
  ROOT %flat = f32[100]{0:T(128)S(1)} bitcast(%cut)
}

%update (q0: f32[6,100], q1: f32[100], q2: s32[]) -> f32[6,100] {
  %q0 = f32[6,100]{1,0} parameter(0)
  %q1 = f32[100]{0} parameter(1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  %row = f32[1,100]{1,0} bitcast(%q1)
  ROOT %in_place = f32[6,100]{1,0} dynamic-update-slice(%q0, %row, %q2, %none)
}

%body (t: (s32[], f32[6,100])) -> (s32[], f32[6,100]) {
  %t = (s32[], f32[6,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %all = f32[6,100]{1,0:T(8,128)} get-tuple-element(%t), index=1
  %one = f32[100]{0:T(128)S(1)} fusion(%all, %i), kind=kLoop, calls=%slice
  %kernel = f32[100]{0} custom-call(%one), backend_config={"bytes_accessed":"1000"}
  %next = f32[6,100]{1,0} fusion(%all, %kernel, %i), kind=kLoop, calls=%update
  ROOT %both = (s32[], f32[6,100]{1,0}) tuple(%i, %next)
}

%condition (c: (s32[], f32[6,100])) -> pred[] {
  %c = (s32[], f32[6,100]{1,0}) parameter(0)
  %bound = s32[] constant(6)
  %at = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%at, %bound), direction=LT
}

ENTRY %main (x: f32[6,100]) -> f32[6,100] {
  %x = f32[6,100]{1,0} parameter(0)
  %start = s32[] constant(0)
  %begin = (s32[], f32[6,100]{1,0}) tuple(%start, %x)
  %loop = (s32[], f32[6,100]{1,0}) while(%begin), condition=%condition, body=%body
  %out = f32[6,100]{1,0} get-tuple-element(%loop), index=1
  ROOT %copied = f32[6,100]{1,0} copy(%out)
}
"""


def test_traffic_of_a_program_by_hand() -> None:
    """A round slices 400 bytes into the core, a kernel says 1000, 400 of them in the core, 400
    more are read and as many written in place, and the index is read twice; at the end 2400 are
    copied."""
    program = parse(PROGRAM)
    [loop] = [x for x in program.computations["main"].instructions.values() if x.opcode == "while"]
    assert trips(loop, program) == 6
    assert moved(program) == 6 * (400 + 4 + 600 + 400 + 400 + 4) + 2 * 2400
    unknown = parse(PROGRAM.replace("direction=LT", "direction=NE"))
    with pytest.raises(NotImplementedError, match="unknown length: loop"):
        moved(unknown)


READS = """HloModule reads

%view (a: f32[100]) -> f32[10,10] {
  %a = f32[100]{0} parameter(0)
  ROOT %seen = f32[10,10]{1,0} bitcast(%a)
}

%total (r0: f32[100], r1: f32[1], r2: s32[]) -> f32[10] {
  %r0 = f32[100]{0} parameter(0)
  %r1 = f32[1]{0} parameter(1)
  %r2 = s32[] parameter(2)
  %updated = f32[100]{0} dynamic-update-slice(%r0, %r1, %r2)
  %square = f32[10,10]{1,0} fusion(%updated), kind=kLoop, calls=%view
  ROOT %sum = f32[10]{0} reduce(%square, %r2), dimensions={1}
}

ENTRY %main (x: f32[100], y: f32[1], i: s32[]) -> f32[10] {
  %x = f32[100]{0} parameter(0)
  %y = f32[1]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %out = f32[10]{0} fusion(%x, %y, %i), kind=kInput, calls=%total
}
"""


def test_what_is_updated_and_read_is_read_whole() -> None:
    assert moved(parse(READS)) == 400 + 4 + 4 + 40


def test_a_parameter_without_a_line_is_not_read() -> None:
    unread = READS.replace("reduce(%square, %r2)", "reduce(%square, %r0)").replace(
        "dynamic-update-slice(%r0, %r1, %r2)", "negate(%r0)"
    )
    fewer = "".join(
        line
        for line in unread.splitlines(keepends=True)
        if "%r1 = " not in line and "%r2 =" not in line
    )
    assert moved(parse(fewer)) == 400 + 40


@pytest.mark.parametrize(
    ("groups", "axes", "ranks"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("b",), 4),
        ("replica_groups=[2,4]<=[8]", ("b",), 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("a",), 2),
        ("replica_groups=[1,8]<=[8]", ("a", "b"), 8),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}", ("b",), 4),
        ("replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", ("a",), 2),
    ],
)
def test_groups_of_the_compiler_are_axes(groups: str, axes: tuple[str, ...], ranks: int) -> None:
    text = f"""HloModule cut

ENTRY %main (x: f32[100]) -> f32[100] {{
  %x = f32[100]{{0}} parameter(0)
  ROOT %sum = f32[100]{{0}} all-reduce(%x), channel_id=1, {groups}, to_apply=%add
}}
"""
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    assert sent(parse(text), mesh) == {Sent("psum", axes, False): 2 * 400 * (ranks - 1) / ranks}
    assert sent(parse(text.replace(groups, "replica_groups={{0},{1}}")), mesh) == {}


CHAIN = """HloModule spread

%start (a: f32[100]) -> (f32[100], f32[400]) {
  %a = f32[100]{0} parameter(0)
  %first = f32[400]{0} all-gather(%a), replica_groups=[2,4]<=[8], frontend_attributes={chain_id="0"}
  ROOT %both = (f32[100], f32[400]) custom-call(%first), custom_call_target="AsyncCollectiveStart"
}

%done (b: f32[100]) -> f32[400] {
  %b = f32[100]{0} parameter(0)
  %last = f32[400]{0} all-gather(%b), replica_groups=[2,4]<=[8], frontend_attributes={chain_id="0"}
  ROOT %end = f32[400]{0} custom-call(%b, %last), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[100]) -> f32[400] {
  %x = f32[100]{0} parameter(0)
  %begun = (f32[100], f32[400]) fusion(%x), kind=kCustom, calls=%start
  ROOT %all = f32[400]{0} fusion(%x), kind=kCustom, calls=%done
}
"""


def test_a_collective_spread_over_fusions_counts_once_and_nothing_waits_for_it() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    assert sent(parse(CHAIN), mesh) == {Sent("all_gather", ("b",), True): 4 * 400 * 3 / 4}
