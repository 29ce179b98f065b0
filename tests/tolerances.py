"""The one table of tolerances, each with its reason. Everything not listed here is compared for exact equality."""

from typing import Any

TOLERANCES: dict[str, Any] = {
    # Steps that are exact in real numbers, in fp32 on numbers of size 1 to 30 and sums of at most 256 of them.
    "exact_steps": {"rtol": 1e-4, "atol": 2e-5},
    # Relative RMS of what centred and rotated formats read back against a float64 reference: fp32 rounding of some ten
    # operations; the limit.
    "recipe": 1e-5,
    # Tokens with a gain, level or channel order on the other side of a tie in fp32: less than one in a hundred.
    "share_of_ties": 0.01,
    # Un-rotating and rotating a key rounds it twice in fp32; the limit on logits of size 1 to 4.
    "rotation_round_trip": 2e-5,
    # Half a step is exact in real numbers; fp32 rounding of (x - zero) / scale and of code * scale + zero adds a few
    # ulp of |x|.
    "half_step_ulp": 4 * 2.0**-23,
    # An fp32 constant has 24 bits, an fp16 zero point 11 and an fp16 scale 11 more: 2^-21 of the constant stays.
    "fp32_constant_in_fp16_metadata": 2.0**-21,
    # The table of cases: total variation distance of attention probabilities, default preset. Measured: 0.022 to 0.024,
    # without window and sinks 0.034 to 0.036.
    "attention_total_variation": 0.04,
    # fp16 metadata, zero point rounded down and scale up, widens a step by 2^-10 of itself for the scale and by 2^-10
    # of |zero| / range, here at most 1, for the zero point.
    "metadata_rounding": 2.0**-9,
    # 1e-6 is no power of two: other mantissas fall otherwise on the grids of fp16 metadata and of 8-bit floats.
    "other_mantissas": 0.03,
    # 1e-6 in fp16 is subnormal, with a spacing of 2^-24 = 0.06e-6: what is delivered back is rounded to it.
    "fp16_subnormal_spacing": 2.0**-24,
    # Decode attention over codes against the fp32 oracle, relative RMS: sums of a few thousand fp32 products in another
    # order, and logarithmic gains by an exponential (1e-6); the limits. In bf16 the output is rounded to 2^-9.
    "attention_fp32": 1e-5,
    "attention_bf16": 5e-3,
    # Beside the rounding of the output to bf16 (1.5e-3 relative RMS) stand weights of 16 bits, which err by 2^-16 of
    # the largest at most, for some hundred channels and tokens: together 1.0044 times the rounding alone, measured.
    "attention_over_rounding": 1.01,
}
