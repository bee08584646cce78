-- reschedule: move the due time of a waiting timeline; by a policy, also the end of a cool-down without records.
--
-- Flags     repeatable
-- Parts     move by hand
-- Commands  HDEL HGET HGETALL HLEN HMGET HSET LLEN PEXPIRE TIME XADD ZADD ZCARD ZRANGE ZREM ZSCORE
-- Reply     text | [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- ARGV[4]   mode (text): 'at', 'delay' or 'policy'
-- ARGV[5]   value (int, ms): the time or the delay; for 'policy' the gap after `iteration`
-- ARGV[6]   iteration (int): for which the policy gave the gap
-- ARGV[7]   delays (text): "initial increment maximum", ms, or JSON of more
-- ARGV[8]   limits (text): "capacity max_size max_age ttl", times in ms
-- ARGV[9]   by_clock (flag): the policy may have worked its delays out from the time of day
-- Returns   {'due', the new due time, or end of the cool-down, ms}, {'outdated'} if the iteration is another, {'state'}
--           if the timeline does not wait, nor cool down, {'retry'} if only a given time can move it, {'stale', the
--           server's time, ms} if the delays do not tell of it; the text of an error if the timeline is broken
--
-- Needs     guard clock tick timelines window state

local key, mode, value, iteration = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local delays, limits = ARGV[7], ARGV[8]
local by_clock = ARGV[9] == '1'
local terms = parse_terms(delays, limits)
if are_stale(terms) then
  return {'stale', now - shift}
end
local waits = call('ZSCORE', waiting, key)
if not waits and (mode ~= 'policy' or state_of(key)) then
  return {'state'}
end
local held, problem = load(key)
if not held then
  return problem
end
if not waits and held.cool <= now then
  return {'state'}
end

-- Return the time that is `delay` after the last digest or the opening. One worked out from the time of day says that
-- nothing has changed if it ends now when it ended then.
local function placed(before, delay)
  local is_same = by_clock and math.abs(now + delay - before) <= SAME_MS
  return is_same and before or held.last + delay
end

local due
if mode ~= 'policy' then
  due = math.max(now, mode == 'at' and value + shift or now + value)
  if not held.id then
    due = clamped(held, terms, due)
  end
elseif held.id then
  return {'retry'}
elseif held.iteration ~= iteration then
  return {'outdated'}
else
  if held.cool > 0 then
    held.cool = placed(held.cool, value)
  end
  if terms.rule and terms.rule ~= 'increment' then
    due = clamped(held, terms, opened_by_rule(held, terms, math.max(1, call('LLEN', logs .. key))))
  elseif held.cool > 0 then
    due = pushed(held, held.cool, terms)
  else
    held.opening = placed(held.opening, terms.initial)
    due = held.opening
  end
end
due = within(terms, key, due)
if waits then
  touch(held, math.max(due - now, 0) + terms.ttl) -- it must still be there when its time comes
  call('ZREM', postponed, key)
  place(key, due, true)
else
  due, held.idle = held.cool, true
end
save(held, FIELDS)
wake()
return {'due', due - shift}
