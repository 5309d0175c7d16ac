"""Reading other packages' signatures from their source, without importing them (importing Megatron's side wants Transformer Engine)."""

import ast
import importlib.util
from functools import cache
from pathlib import Path


@cache
def source_file(module: str) -> Path | None:
    """The file of a module, found from its top-level package's folder; None when there is no such module."""
    top, *rest = module.split('.')
    spec = importlib.util.find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        return Path(spec.origin) if spec is not None and spec.origin and not rest else None
    for folder in spec.submodule_search_locations:
        path = Path(folder).joinpath(*rest)
        for candidate in (path / '__init__.py', path.with_suffix('.py') if rest else path):
            if candidate.is_file():
                return candidate
        if path.is_dir():
            return path
    return None


@cache
def tree(module: str) -> ast.Module:
    path = source_file(module)
    assert path is not None, f'{module} is gone'
    return ast.parse(path.read_text(encoding='utf-8')) if path.is_file() else ast.Module(body=[], type_ignores=[])


def binds(module: str, name: str) -> bool:
    """Whether the module binds the name at its top level, also under `if` and `try`, names it in the table of a lazy package, or takes it
    by a star import."""
    names, stars, strings = top_level(module)
    return name in names or name in strings or any(binds(star, name) for star in stars if star != module)


@cache
def top_level(module: str) -> tuple[set[str], list[str], set[str]]:
    """Names bound at the top level; modules that are star-imported; strings in the module's assignments (tables of lazy packages)."""
    names: set[str] = set()
    stars: list[str] = []
    strings: set[str] = set()
    pending: list[ast.stmt] = list(tree(module).body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if alias.name == '*' and isinstance(node, ast.ImportFrom):
                    stars.append(absolute(module, node))
                else:
                    names.add((alias.asname or alias.name).split('.')[0])
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            strings |= {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant) and isinstance(part.value, str)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            pending += [*node.body, *getattr(node, 'orelse', []), *getattr(node, 'finalbody', [])]
            pending += [inner for handler in getattr(node, 'handlers', []) for inner in handler.body]
    return names, stars, strings


def absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ''
    path = source_file(module)
    parts = module.split('.')
    package = parts if path is not None and path.name == '__init__.py' else parts[:-1]
    base = package[: len(package) - node.level + 1]
    return '.'.join([*base, node.module] if node.module else base)


def signature(module: str, qualified: str) -> str:
    """Parameters of a function or method as written, without annotations: `self, models, target_device=None`."""
    body: list[ast.stmt] = tree(module).body
    *classes, name = qualified.split('.')
    for part in classes:
        (found,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == part]
        body = found.body
    functions = [node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name]
    assert functions, f'{module}:{qualified} is gone'
    return parameters(functions[-1].args)


def parameters(given: ast.arguments) -> str:
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    parts = [written(a, d) for a, d in zip(positional, defaults)]
    if given.vararg:
        parts.append(f'*{given.vararg.arg}')
    elif given.kwonlyargs:
        parts.append('*')
    parts += [written(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults)]
    if given.kwarg:
        parts.append(f'**{given.kwarg.arg}')
    return ', '.join(parts)


def written(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f'{argument.arg}={ast.unparse(default)}'
