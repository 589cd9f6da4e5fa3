"""Pages that code writes, as a hook of MkDocs: settings from the schema, commands from the command line. Nothing of them is committed."""

import re
import textwrap
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from moerl.__main__ import app
from moerl.config.reference import ReferenceEntry, parent_of, settings


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, content in (("settings.md", settings_page()), ("commands.md", commands_page())):
        files.append(File.generated(config, path, content=content))
    return files


def settings_page() -> str:
    """Every setting as Markdown, a heading for each section."""
    intro = (
        "# Settings\n\nEvery setting of a run, from the schema (`moerl/config/schema`). `moerl explain KEY` prints what stands here, "
        "`moerl check` the values that a run has. NAME stands for a name of your choice, INDEX for a place in a list, from 0.\n"
    )
    parts = [intro, "\n## The run\n\n", *(_item(setting) for setting in settings() if not parent_of(setting.path))]
    for section in settings():
        fields = [setting for setting in settings() if parent_of(setting.path) == section.path]
        if fields:
            parts.append(f"\n## {section.path} {{ #{section.path} }}\n\n")
            parts += [*(f"{_escaped(line)}\n\n" for line in section.lines), *map(_item, fields)]
    return "".join(parts)


def _item(setting: ReferenceEntry) -> str:
    """An entry of a definition list; one that is a section of its own leads there."""
    name = f"[`{setting.path}`](#{setting.path})" if setting.is_section and _has_fields(setting.path) else f"`{setting.path}`"
    first, *further = map(_escaped, setting.lines)
    return "".join([f"{name}\n:   {first}\n\n", *(f"    {line}\n\n" for line in further)])


def _has_fields(path: str) -> bool:
    return any(parent_of(setting.path) == path for setting in settings())


def _escaped(text: str) -> str:
    """Markdown that shows the text as it is, but for code in backticks."""
    parts: list[str] = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]{}|])", r"\\\1", part) for part in parts)


def commands_page() -> str:
    group: Any = typer.main.get_command(app)
    context = group.make_context("moerl", [], resilient_parsing=True)
    parts = [
        "# Commands\n\n`moerl COMMAND --help` prints the same. A recipe is named as `recipe=NAME`; `KEY=VALUE` sets what "
        "[Settings](settings.md) lists, `~KEY` takes a setting of the recipe out.\n\n",
        "What a command ends with is in [Exit codes](failures.md#exit-codes).\n",
    ]
    for name, command in sorted(group.commands.items()):
        parts.append(_section(command, command.make_context(name, [], parent=context, resilient_parsing=True)))
    return "".join(parts)


def _section(command: Any, context: Any) -> str:
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    text = textwrap.dedent(command.help or "").strip()
    records = [record for parameter in command.params if (record := parameter.get_help_record(context)) is not None]
    entries = [
        f"`{' '.join(names.replace('<list[str]>', '').split())}`\n:   {' '.join(help_text.split())}\n\n" for names, help_text in records
    ]
    return f"\n## moerl {context.info_name}\n\n    {usage}\n\n{text}\n\n" + "".join(entries)
