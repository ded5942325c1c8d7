"""All kinds, in the order of the table."""

import analysis_kinds
import attention_kinds
import command_line_kinds
import damaged_run_kinds
import interop_kinds
import masks_and_biases
import module_kinds
import monotonic_kinds
import normalizer_kinds
import search_kinds
import window_and_coverage_kinds

FUNCTIONS = [
    *attention_kinds.KINDS,
    *normalizer_kinds.KINDS,
    *masks_and_biases.KINDS,
    *window_and_coverage_kinds.KINDS,
    *monotonic_kinds.KINDS,
    *search_kinds.KINDS,
    *analysis_kinds.KINDS,
    *interop_kinds.KINDS,
    *module_kinds.KINDS,
]
COMMANDS = [*command_line_kinds.KINDS, *damaged_run_kinds.KINDS]
KINDS = [*FUNCTIONS, *COMMANDS]
