#!/usr/bin/env python3
"""Writes one source that holds several test files, each in a namespace of its own.

Usage: join_tests.py OUTPUT FILE...

A file that includes libtorch costs a compiler seconds before its first line; files that are compiled together share
them. Helpers of the same name in two files stay apart, and messages still name the file (from the root of the sources)
and the line.
"""
import pathlib
import re
import sys


ROOT = pathlib.Path(__file__).resolve().parent.parent


def joined(path: pathlib.Path) -> str:
    source = path.resolve().relative_to(ROOT)  # the same text in every checkout, which ccache then knows
    lines = path.read_text().splitlines()
    start = 1 + max(number for number, line in enumerate(lines) if line.startswith("#include"))
    name = f"in_{path.parent.name}_{path.stem}"
    body = "\n".join(lines[start:])
    inner = re.sub(r"^namespace (fsdp2[\w:]*) \{$", rf"namespace \1::{name} {{", body, flags=re.MULTILINE)
    before, after = ("", "") if inner != body else (f"namespace {name} {{", f"}}  // namespace {name}")
    return "\n".join(
        [f'#line 1 "{source}"', *lines[:start], before, f'#line {start + 1} "{source}"', inner, after, ""])


def main() -> None:
    output, *files = map(pathlib.Path, sys.argv[1:])
    output.write_text("\n".join(map(joined, files)))


main()
