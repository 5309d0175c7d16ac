"""What ${VAR#pattern} and $((arithmetic)) come to (import tier 0; pure)."""

from __future__ import annotations

import ast
import operator
import re


def trim(value: str, op: str, pattern: str) -> str:
    """${VAR#pattern} and its relatives, with * and ? as the only wildcards."""
    expression = re.escape(pattern).replace(r'\*', '.*' if len(op) == 2 else '.*?').replace(r'\?', '.')
    if op.startswith('#'):
        return re.sub(f'^{expression}', '', value, count=1)
    found = [index for index in range(len(value) + 1) if re.fullmatch(expression.replace('.*?', '.*'), value[index:])]
    if not found:
        return value
    return value[: found[0] if op == '%%' else found[-1]]


_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}


def evaluate(node: ast.AST) -> int:
    """Whole-number arithmetic of the four kinds. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        result: int = _BINARY[type(node.op)](evaluate(node.left), evaluate(node.right))
        return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    raise ValueError('not whole-number arithmetic')
