"""The command line, ``tensorcas``; ``docs/command-line.md`` is its page.

Words of a command line come in; text or JSON and an exit status go out. This room imports the integration, maintenance,
the reader and the rooms below them. It calls their functions and holds no logic of the store.

| module | holds |
|---|---|
| `_look` | ``list``, ``stats``, ``du``, ``show``, ``diff``, ``lineage``, ``explain`` |
| `_maintenance` | ``init``, ``verify``, ``repair``, ``optimize``, ``delete`` |
| `_gc` | ``gc`` |
| `_transfer` | ``copy``, ``import``, ``export``, ``convert`` |
| `_adopt` | ``adopt`` |
| `_completion` | ``completion`` |
| `_command` | declaration of commands and options, and the values of options |
| `_select` | the store, the run and the checkpoint that a command means, by path, URI, id or name |
| `_output` | text, JSON and questions |
| `_tables` | tables, for terminals and for pipes |
| `_progress` | the bar of long work |
| `_main` | the parser, and exit statuses |

To add a command, write a function from parsed options to an exit status, a `Command` for it in the ``COMMANDS`` of its
module, and its name in `_main`. A test demands a section in ``docs/command-line.md``.
"""

from tensorcas_mlflow.cli._main import main

__all__ = ["main"]
