-- reschedule: move the due time of a waiting timeline.
--
-- Flags     repeatable
-- Parts     move by hand
-- Commands  HDEL HGET HGETALL HSET PEXPIRE TIME XADD ZADD ZCARD ZRANGE ZREM ZSCORE
-- Reply     text | [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- ARGV[4]   mode (text): 'at', 'delay' or 'policy'
-- ARGV[5]   value (int, ms): the time or the delay; for 'policy' the gap after `iteration`
-- ARGV[6]   iteration (int): for which the policy gave the gap
-- ARGV[7]   delays (text): "initial increment maximum", ms
-- ARGV[8]   limits (text): "capacity max_size max_age ttl", times in ms
-- Returns   {'due', the new due time, ms}, {'outdated'} if the iteration is another, {'state'} if the timeline does
--           not wait, {'retry'} if only a given time can move it; the text of an error if the timeline is broken
--
-- Needs     guard clock timelines window

local key, mode, value, iteration = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local delays, limits = ARGV[7], ARGV[8]
local terms = parse_terms(delays, limits)
if not call('ZSCORE', waiting, key) then
  return {'state'}
end
local held, problem = load(key)
if not held then
  return problem
end

local due
if mode ~= 'policy' then
  due = math.max(now, mode == 'at' and value or now + value)
  if not held.id then
    due = math.max(held.cool, math.min(due, held.last + terms.maximum))
  end
elseif held.id then
  return {'retry'}
elseif held.iteration ~= iteration then
  return {'outdated'}
elseif held.cool > 0 then
  held.cool = held.last + value
  due = pushed(held, held.cool, terms)
else
  due = held.last + terms.initial
end
touch(held, math.max(due - now, 0) + terms.ttl) -- it must still be there when its time comes
place(key, due, true)
save(held, FIELDS)
wake()
return {'due', due}
