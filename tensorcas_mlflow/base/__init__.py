"""Base: settings, threads, digests, tensors, and small helpers that every room may use.

Values come in and values go out. The room imports `adapter` and `errors` only, and knows no store. Other rooms import
its modules, not names from here, so that a save does not wait for what it does not use.

| module | holds |
|---|---|
| `config` | settings; the only module that reads `os.environ` |
| `threads` | pools, background work, lazy attributes; the only module that starts threads |
| `digest` | BLAKE3 digests, in bulk |
| `tensors`, `dtypes`, `content_cuts` | specs, raw bytes, chunk boundaries, names of dtypes |
| `sketch` | sampled words of a tensor, and their comparison |
| `ubjson` | XGBoost's binary JSON |
| `files` | durable names, private mappings, process ids |
| `text`, `progress` | sizes and counts in words, and the progress of a long call |

A helper of one room stays in that room.
"""
