"""Hold whole files in a host's RAM, and write each to its path in the background.

A trainer serialises a file into RAM, and goes on once the file is *sealed*. The file agent, a
process of the user's own on each host, outlives the trainer and writes the bytes as an ordinary
file. It knows nothing of runs, of frameworks, and of what is in a file.

`python -m holdfast.interop.mindio.file_agent` runs it; `client` starts it.
"""
