"""Define all numerical tolerances, each once, in three kinds.

- Nudges measure rounding: weights are changed in their last bits, or a run is
  compared with the same run in float64. A bound is a multiple of the measured
  rounding.
- Floors are differences that are ignored, in units of rounding. A unit is
  `torch.finfo(dtype).eps` times the largest number compared.
- Shares are for numbers whose unit of rounding is not known, because a model
  may compute in any dtype inside. They are shares of the compared size, or of
  the spread (the standard deviation) of the scores.

The end of a name says what its value counts: UNITS of rounding, measured
NOISES, a SHARE of a size or of the SPREAD, NATS of a log-probability. After
changing one, run the checks and the diff on the kit's broken models.

Which dtype counts is decided in rounding.py (`floor_of`) for scores, and in
comparison/values/matching.py for a diff. Elsewhere the code that uses a
constant decides.
"""

import torch

# --- Nudges: the effect of rounding on a model is measured -------------------

NUDGE_UNITS = 256  # most units by which a nudge changes a weight
NUDGE_UNITS_OF_16_BITS = 2  # 256 units of bfloat16 are twice the weight
STEADY_SHARE = 0.2  # a difference is real if nudges change it by less
NUDGE_NOISES = 16  # a difference above so many effects of a nudge is real
NUDGE_NOISES_OF_16_BITS = 4  # NUDGE_NOISES for 16 bits
MEASURED_NOISES = 8  # rounding: up to so many times the distance to float64
FRESH_SCORER_BOUNDS = 16  # roundings between fresh scorers, which may train

# --- Floors: units of rounding of the largest number -------------------------

FLOOR_UNITS = 64  # a smaller difference is ignored, and no weight is nudged
FLOOR_UNITS_OF_16_BITS = 2  # 64 units of bfloat16 are half the number
# FLOOR_UNITS for a function, because the kit cannot nudge its weights
FLOOR_UNITS_WITHOUT_WEIGHTS = {torch.float64: 2**20, torch.float32: 2**8}
FLOOR_UNITS_WITHOUT_WEIGHTS_OF_16_BITS = 16
PRINTED_UNITS = 2  # units of the last digit that a program prints
UNNUDGED_UNITS = 2**12  # for a value in `diff`, where no weight is nudged
RECORDED_UNITS = 2**9  # for an array in a file; two GELUs differ by more
MEASURED_UNITS = 4  # for a value whose noise is measured against float64
MEASURED_UNITS_OF_16_BITS = 1  # MEASURED_UNITS for 16 bits
DROPPED_UNITS = 8  # for inputs of dropout: units of the largest input
OWN_UNITS = 4  # for a value in a coarser dtype than that of its run
DIGEST_UNITS = 16  # values are compared if their digests are this near
FINE_UNIT = 2.0**-40  # a smaller unit of rounding hides no fault
FLOORS_IN_DOUBT = 1.5  # more than so many accepted roundings is a fault
GRADIENT_UNITS = 2**10  # for a gradient: units of its largest entry
GRADIENT_UNIT_AT_MOST = 2.0**-16  # 2**10 coarser units would hide a fault
PLACED_UNITS = 2**9  # for sums that ranks add up in another order
PLACED_UNITS_OF_FLOAT64 = 2**16  # PLACED_UNITS for float64

# --- Shares: the unit of rounding is not known -------------------------------

FLOAT32_SHARE = 1e-6  # eight units of float32, which any model may use inside
INSIDE_EXPONENT = 2 / 3  # power of the unit: rounding adds up inside a model
DIGEST_SHARE = 1e-3  # values are compared if their digests are this near
MARKS_SHARE = 1e-5  # scaled order statistics this near differ only by a factor
FACTOR_SHARE = 1e-6  # a factor nearer to 1 counts as 1
ROOT_SHARE = 1e-5  # a factor nearer to a root counts as the root
DROPPED_SHARE = 1e-4  # for inputs of dropout: a share of the largest input
RECORDED_SCORES_SHARE = 0.05  # recorded scores this near are those of the run
SUM_SHARE_IN_16_BITS = 0.02  # how far from 1 probabilities may sum
SPREAD_OF_A_RIGHT_WAY = 1e-3  # a right way to decode gives scores this near
SPREAD_OF_AN_IDLE_MASK = 1e-4  # largest change by a mask that hides nothing
SPREAD_OF_ANOTHER_PROGRAM = 1e-2  # float32's rounding stays below it
SPREAD_OF_ANOTHER_PROGRAM_IN_16_BITS = 0.3  # for 16 bits
LOSS_SHARES = {
    torch.float64: 1e-6,
    torch.float32: 1e-5,
}  # relative to 1 + loss
LOSS_SHARE_OF_16_BITS = 1e-2
SPLIT_LOSS_SHARE = 1e-3  # how nearly the loss of two positions is their mean
TERM_SHARE = 1e-6  # terms of two losses are equal if they are this near
TERM_SHARE_OF_THREE = 1e-5  # TERM_SHARE for the terms of three losses
SMOOTHED_SHARE = 1e-4  # for shares of label smoothing, which are quotients
RANK_GRADIENT_SHARE = 1e-6  # for one gradient on several ranks
GRADIENT_FLOOR_SHARE = 1e-3  # of the largest gradient: less is rounding
NORMALISED_NATS = 1e-4  # largest logsumexp of scores that count as normalised
STYLE_NATS_IN_FLOAT64 = 1e-12  # largest difference measured: 3.6e-15
STYLE_NATS = 1e-6  # for float32 and coarser; the styles' own errors are added
