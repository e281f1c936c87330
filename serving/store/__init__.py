# SPDX-License-Identifier: Apache-2.0
"""Files and batches that callers leave with the server, each key's in a directory of its own.

`records` are what is known of them, `owner` is one key's directory, `store` all of them: the lock, the one thread that
works on the disk, what is there after a start. Every record is a JSON file that is whole or was not written; a content
without one does not exist. Names on disk are ids that were made here. Knows nothing of HTTP or of models.
"""
