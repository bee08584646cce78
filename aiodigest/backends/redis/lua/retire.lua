-- retire: end a shard that has been drained, if it holds nothing.
--
-- Flags     repeatable, replicated
-- Commands  EXISTS HGET HMGET HSET PEXPIRE TIME UNLINK ZCARD ZCOUNT
-- Reply     nil | int | [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   retired (text): its version from now on, so that whoever knew it looks for the new layout; '': only look
-- Returns   its counters (name, number, ...), 1 if it has ended, or nothing if it holds something
--
-- Needs     guard clock tick keys telling

local retired, dead = ARGV[3], tag .. 'dead'
if call('EXISTS', waiting, ready, leased, tag .. 'seens', tag .. 'mutes') > 0
  or call('ZCOUNT', dead, string.format('(%.0f', now - DEAD_LETTER_TTL_MS), '+inf') > 0 then
  return false
end
if retired ~= '' then
  call('UNLINK', dead, postponed, tag .. 'pauses', tag .. 'silences', tag .. 'sizes', tag .. 'wake')
  call('HSET', layout, 'version', retired)
  if not call('HGET', layout, 'current') then -- else it is the namespace's as well
    call('PEXPIRE', layout, DEAD_LETTER_TTL_MS) -- until then whoever slept is told
  end
  return 1
end
local function tell_some(name, number)
  tell(name, number > 0 and number or nil)
end
for _, name in ipairs(COUNTERS) do
  tell_some(name, read_counter(name) or 0)
end
tell_some('letters_dropped', call('ZCARD', dead)) -- what is left there has reached its 30 days
return told
