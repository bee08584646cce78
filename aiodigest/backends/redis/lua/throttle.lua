-- throttle: hand out tokens for attempts, take back those that were not used, and pass on whom all workers hold back.
--
-- The generic cell rate algorithm: `tat` is when, at one token every `interval`, all would be paid off that were handed
-- out; it may lie up to `burst` intervals ahead. Its time is this shard's clock, and never steps back.
--
-- Flags     begins-namespace
-- Parts     deliver
-- Commands  HGET HMGET HSET PERSIST TIME ZADD ZCARD ZCOUNT ZMSCORE ZRANGE ZREMRANGEBYRANK
-- Reply     [int, int, int, int, int, [number...]]
-- KEYS[1]   layout (guard): of the first shard that takes adds
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   wanted (int): how many tokens at the most
-- ARGV[4]   interval (int, us)
-- ARGV[5]   burst (int)
-- ARGV[6]   rest (int, us): for how long none is handed out after a change of the shards, of which the old ones did
-- ARGV[7]   asker (text): the number of the process
-- ARGV[8]   known (int): the number of the pauses that it knows
-- ARGV[9]   given_back (int): how many pairs follow first
-- then      for each grant of which tokens come back: when it was, us; how many; then for each destination that pauses:
--           its name; for how long, ms
-- Returns   how many tokens; when, us; how long until there is another, us; 1 if another has asked in vain since; the
--           number of the pauses, and if that is not known: each destination, and how long it still pauses, ms
--
-- Needs     guard clock

call('PERSIST', layout)
-- Needs     tick

local wanted, interval, burst = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local rest, asker, known, given_back = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
local pauses = tag .. 'pauses'

local function read_number(text)
  local value = text and tonumber(text)
  return value and value >= 0 and value < 9e15 and value % 1 == 0 and value or 0
end

local marks = call('HMGET', layout, 'tat', 'took', 'refused', 'paused')
local time = math.max(1000 * now + micros, read_number(marks[2]))
-- by then nothing that was handed out before is in any window: later than that `tat` cannot be, unless another throttle
-- or program has written it
local latest_tat = time + rest + (burst - 1) * interval
local is_changed = not marks[1] and tonumber(string.match(expected, '%d+$')) > 1
local tat = is_changed and latest_tat or math.min(latest_tat, read_number(marks[1]))

local cursor = 10
for _ = 1, given_back do
  -- what would have been paid off meanwhile without them is not given twice
  local passed = math.max(0, time - tonumber(ARGV[cursor]))
  tat = tat - math.max(0, ARGV[cursor + 1] * interval - passed)
  cursor = cursor + 2
end

tat = math.max(tat, time)
local count = math.max(0, math.min(wanted, burst + math.floor((time - tat) / interval)))
tat = tat + count * interval
local refused = marks[3]
local contended = refused and refused ~= asker
if wanted > count and count == 0 then
  refused = asker
end
call('HSET', layout, 'tat', string.format('%.0f', tat), 'took', string.format('%.0f', time), 'refused', refused or asker)

local over = call('ZCOUNT', pauses, '-inf', now)
local paused, first = read_number(marks[4]), cursor
for each = first, #ARGV, 2 do
  local ends = now + ARGV[each + 1]
  if ends > tonumber(call('ZMSCORE', pauses, ARGV[each])[1] or 0) then
    call('ZADD', pauses, ends, ARGV[each])
    paused = paused + 1
  end
end
if paused > read_number(marks[4]) then
  call('HSET', layout, 'paused', paused)
  over = math.max(call('ZCOUNT', pauses, '-inf', now), call('ZCARD', pauses) - PAUSES)
end
if over > 0 then
  call('ZREMRANGEBYRANK', pauses, 0, over - 1)
end
local told = {}
if paused ~= known then
  local found = call('ZRANGE', pauses, 0, -1, 'WITHSCORES')
  for each = 1, #found, 2 do
    told[#told + 1] = found[each]
    told[#told + 1] = found[each + 1] - now
  end
end
return {count, time, math.max(0, tat - (burst - 1) * interval - time), contended and 1 or 0, paused, told}
