"""Einsum equations of an input and a kernel."""

from __future__ import annotations

import string


def problem(equation: str) -> str:
    """Says why an equation is no matrix product, or "".

    It is one where each label stands in exactly two of the three terms.
    """
    operands, arrow, result = equation.replace(" ", "").replace("...", "").partition("->")
    terms = [*operands.split(","), result]
    if not arrow or len(terms) != 3:
        return f"the equation {equation!r} is not of the form 'input,kernel->result'"
    if "..." in equation.partition(",")[2].partition("->")[0]:
        return f"the equation {equation!r} has an ellipsis in the kernel"
    for label in sorted(set("".join(terms))):
        count = [term.count(label) for term in terms]
        if max(count) > 1:
            return f"the equation {equation!r} has the label {label!r} twice in one term"
        if sum(count) != 2:
            return f"the equation {equation!r} has the label {label!r} in {sum(count)} of its 3 terms; 2 make a product"
    return ""


def explicit(equation: str, rank: int) -> str:
    """Writes the ellipsis of an equation out.

    Raises:
        ValueError: it is no matrix product, or not of an input of that rank.
    """
    wrong = problem(equation)
    if wrong:
        raise ValueError(f"FP8 computes matrix products of an input and a kernel, but {wrong}")
    equation = equation.replace(" ", "")
    named = equation.partition(",")[0].replace("...", "")
    missing = rank - len(named)
    if missing < 0 or (missing and "..." not in equation):
        raise ValueError(f"equation={equation!r} takes inputs of {len(named)} axes, got {rank}")
    fresh = [label for label in string.ascii_letters if label not in equation]
    return equation.replace("...", "".join(fresh[:missing]))


def summed_axes(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes that a product sums over, left and right, paired."""
    left, right = equation.split("->")[0].split(",")
    summed = [label for label in left if label in right]
    return tuple(left.index(label) for label in summed), tuple(right.index(label) for label in summed)
