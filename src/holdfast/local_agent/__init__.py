"""An agent of this host: a process that is started by the first one that needs it.

It holds a place, a private folder on the RAM tier's root, by a lock, so there is never a second one
there. It is no child of the process that started it, and outlives it. All processes of its user
call it over a Unix socket in the folder.

A run's agent (`holdfast.host`) is one, and so is MindIO's file agent. An agent needs:

- a module that `python -m` runs: it calls `detached_process.run_detached` with its main function;
- a main function that keeps `place.locked_place`, and serves `calls.serve_calls` until it leaves;
- in the processes that use it, a `client.LocalAgentClient`, and `launch.await_agent` where that
  raises `AgentGoneError`.

What an agent keeps in its folder is its state: the next one adopts it after a crash.

See docs/decisions/0047.
"""
