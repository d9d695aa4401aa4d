"""The step loop: scheduler, input buffers, runner, core, and whose turn it is."""
