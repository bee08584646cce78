-- retire: end a shard that has been drained, if it holds nothing.
--
-- ARGV[3]  what its version is from now on, so that whoever knew it looks for the new layout; '': only look
-- Returns  its counters (name, number, ...), or nothing if it holds something

local DAY = 24 * HOUR
local dead = tag .. 'dead'

if call('EXISTS', waiting, ready, leased) > 0 or call('ZCOUNT', dead, '(' .. whole(now - LETTER_TTL), '+inf') > 0 then
  return false
end
local counters = {}
for _, name in ipairs(COUNTERS) do
  local number = call('HGET', layout, name)
  if number then
    counters[#counters + 1] = name
    counters[#counters + 1] = number
  end
end
if ARGV[3] ~= '' then
  call('UNLINK', dead, tag .. 'wake')
  call('HSET', layout, 'version', ARGV[3])
  if not call('HGET', layout, 'current') then -- else it is the namespace's as well
    call('PEXPIRE', layout, DAY)
  end
end
return counters
