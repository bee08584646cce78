-- counts: the sizes of a shard's sets and what happened in it.
--
-- Returns  name, number, ... ; `oldest_due_ms` only if a timeline is waiting or ready, `overdue_ms` only if it is due

local counts = {}
local function tell(name, number)
  if number then
    counts[#counts + 1] = name
    counts[#counts + 1] = number
  end
end

for _, name in ipairs({'waiting', 'ready', 'leased'}) do
  tell(name, call('ZCARD', tag .. name))
end
tell('dead', call('ZCOUNT', tag .. 'dead', '(' .. whole(now - LETTER_TTL), '+inf'))
for _, name in ipairs(COUNTERS) do
  tell(name, tonumber(call('HGET', layout, name)))
end
local next_ready = tonumber(call('ZRANGE', ready, 0, 0, 'WITHSCORES')[2])
local next_waiting = tonumber(call('ZRANGE', waiting, 0, 0, 'WITHSCORES')[2])
if next_ready or next_waiting then
  local oldest = math.min(next_ready or math.huge, next_waiting or math.huge)
  tell('oldest_due_ms', oldest)
  tell('overdue_ms', oldest < now and now - oldest or nil)
end
return counts
