"""The command group and how errors end the program."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import get_completion_class

from tierfs import __version__
from tierfs.cli import archives, inspect, mounting, moving, recovering
from tierfs.cli.render import printable
from tierfs.errors import TierfsError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tierfs")
def cli() -> None:
    """A checkpoint filesystem: files are acknowledged in memory and drained to disk and archive.

    \b
    Examples:
      tierfs mount /etc/tierfs/ckpt.yaml /mnt/ckpt
      tierfs status
      tierfs flush /mnt/ckpt/run42 --timeout 5m
      tierfs umount /mnt/ckpt

    Exit codes: 0 done, 1 failed, 2 wrong usage or policy file, 3 not durable in time.
    """


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    Examples:
      tierfs completion bash > /etc/bash_completion.d/tierfs
      tierfs completion fish > ~/.config/fish/completions/tierfs.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "tierfs", "_TIERFS_COMPLETE").source(), nl=False)


for _command in (*mounting.COMMANDS, *inspect.COMMANDS, *moving.COMMANDS, *recovering.COMMANDS, *archives.COMMANDS):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code. Errors made on purpose become one line on stderr."""
    try:
        result = cli.main(
            args=None if arguments is None else list(arguments), prog_name="tierfs", standalone_mode=False
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except TierfsError as error:
        print(f"tierfs: {printable(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of a pipe left; without this the interpreter complains once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"tierfs: {printable(where + (error.strerror or str(error)))}", file=sys.stderr)
        return 1
