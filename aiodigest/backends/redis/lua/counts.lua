-- counts: tell the sizes of a shard's sets and what happened in it.
--
-- Flags     repeatable
-- Parts     look
-- Commands  HGET HMGET TIME ZCARD ZCOUNT ZRANGE
-- Reply     [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- Returns   name, number, ...; `oldest_due_ms` only if a timeline is waiting, ready, or under a lease that has ended,
--           `overdue_ms` only if it is due, `stepped_back_ms` only if the server's clock did so in the last hour
--
-- Needs     guard clock keys telling

tell('waiting', call('ZCARD', waiting))
tell('ready', call('ZCARD', ready))
tell('leased', call('ZCARD', leased))
tell('mutes', call('ZCARD', tag .. 'mutes'))
tell('dead', call('ZCOUNT', tag .. 'dead', string.format('(%.0f', now - DEAD_LETTER_TTL_MS), '+inf'))
for _, name in ipairs(COUNTERS) do
  tell(name, read_counter(name))
end
local next_ready = tonumber(call('ZRANGE', ready, 0, 0, 'WITHSCORES')[2])
local next_waiting = tonumber(call('ZRANGE', waiting, 0, 0, 'WITHSCORES')[2])
local next_end = tonumber(call('ZRANGE', leased, 0, 0, 'WITHSCORES')[2])
local ended = next_end and next_end <= now and next_end -- nobody holds it, whoever may take it
if next_ready or next_waiting or ended then
  local oldest_postponed = tonumber(call('ZRANGE', postponed, 0, 0, 'WITHSCORES')[2])
  local oldest = math.min(
    next_ready or math.huge, next_waiting or math.huge, ended or math.huge, oldest_postponed or math.huge
  )
  tell('oldest_due_ms', oldest - shift)
  tell('overdue_ms', oldest < now and now - oldest or nil)
end
local marks = call('HMGET', layout, 'stepped', 'step')
tell('stepped_back_ms', step > 0 and step or now - read_time(marks[1]) < STEP_TOLD_MS and read_time(marks[2]) or nil)
return told
