-- tick: note the time every second, and each step back of the server's clock.
--
-- It needs memory: where a full server is to run the script, it stands after PERSIST.
--
-- Needs    clock

if not version then -- the shard is empty, and stays so
elseif step > 0 then
  try('HSET', layout, 'shift', shift, 'stepped', now, 'step', step)
elseif now - latest >= STEP_MS then
  try('HSET', layout, 'clock', now, 'shift', shift)
end
