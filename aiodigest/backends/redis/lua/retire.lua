-- retire: end a shard that has been drained, if it holds nothing.
--
-- ARGV[3]  what its version is from now on, so that whoever knew it looks for the new layout; '': only look
-- Returns  its counters (name, number, ...), 1 if it has ended, or nothing if it holds something

local dead = tag .. 'dead'

if call('EXISTS', waiting, ready, leased) > 0 or call('ZCOUNT', dead, '(' .. whole(now - LETTER_TTL), '+inf') > 0 then
  return false
end
local counters = {}
local function tell(name, number)
  if number > 0 then
    counters[#counters + 1] = name
    counters[#counters + 1] = number
  end
end
for _, name in ipairs(COUNTERS) do
  tell(name, tonumber(call('HGET', layout, name)) or 0)
end
tell('letters_dropped', call('ZCARD', dead)) -- what is left there has reached its 30 days
if ARGV[3] ~= '' then
  call('UNLINK', dead, tag .. 'wake')
  call('HSET', layout, 'version', ARGV[3])
  if not call('HGET', layout, 'current') then -- else it is the namespace's as well
    call('PEXPIRE', layout, LETTER_TTL) -- until then whoever slept is told
  end
  return 1
end
return counters
