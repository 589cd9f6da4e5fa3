"""Pages that code writes, as a hook of MkDocs: settings from the schema, commands from the command line. Nothing of them is committed."""

import textwrap
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from moerl.__main__ import app
from moerl.config.reference import reference_page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, content in (("settings.md", reference_page()), ("commands.md", commands_page())):
        files.append(File.generated(config, path, content=content))
    return files


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
