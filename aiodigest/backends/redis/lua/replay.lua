-- replay: put a dead letter's records before newer ones, schedule as an add would, and remove the letter.
--
-- Parts     move by hand
-- Commands  HDEL HGET HGETALL HINCRBY HLEN HMGET HSET LLEN LPUSH LRANGE PEXPIRE RPUSH TIME UNLINK XADD ZADD ZCARD
--           ZRANGE ZREM ZSCORE
-- Reply     text | [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   id (text): of the letter
-- ARGV[4]   delays (text): "initial increment maximum", ms, or JSON of more
-- ARGV[5]   limits (text): "capacity max_size max_age ttl", times in ms
-- ARGV[6]   own (text): '1' if these limits are the timeline's own, '0' if not, '' to take those that it has, or had
-- Returns   {'ready'} or {'added'}; and changes nothing for {'missing'}, {'open', key}, {'full', key, size, capacity},
--           {'stale', the server's time, ms} if the delays do not tell of it, or the text of an error if the timeline is
--           broken
--
-- Needs     guard clock tick timelines window entries lists dead seen

local id, delays, limits, own = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local letter, remains = tag .. 'letter:' .. id, tag .. 'remains:' .. id
local facts = call('HMGET', letter, 'key', 'buried', 'limits')
local key = facts[1]
if not key or (tonumber(facts[2]) or now) <= now - DEAD_LETTER_TTL_MS then
  return {'missing'}
end
local held, problem = load_all(key)
if not held then
  return problem
end
if held.id or held.opened > 0 then
  return {'open', key}
end
local kept = own == '1' and limits
if own == '' then
  kept = held.own or facts[3] and are_limits(facts[3]) and facts[3]
end
local terms = parse_terms(delays, kept or limits, kept)
if are_stale(terms) then
  return {'stale', now - shift}
end
local length, seen = call('LLEN', remains), {}
if length > LONGEST then
  return too_long(length)
end
local buried = collect({}, {}, remains, length)
local size = #collect(collect({}, seen, logs .. key, held.logged), seen, remains, #buried)
if size > terms.capacity then
  return {'full', key, size, terms.capacity}
end

local due = tonumber(call('ZSCORE', waiting, key))
local is_ready, settled = false, call('ZSCORE', ready, key) or call('ZSCORE', postponed, key) -- left to other workers
local is_muted = false
if has_mutes then
  -- Needs   mutes
  is_muted = (mute_of(key) or 0) > now
  settled = settled or not due and held.due > 0 -- nothing pushes what waits under a mute
end
push_front(logs .. key, buried)
unsee(key, buried)
held.own = terms.own
touch(held, terms.ttl)
if held.logged == 0 and not held.touched then
  call('PEXPIRE', logs .. key, lifetime(held, terms.ttl))
end
need(held, terms.needs)
if is_muted then
  need(held, 'mute')
end
held.max_bytes = terms.max_bytes > 0 and terms.max_bytes or held.max_bytes
if terms.rule then
  is_ready = open_or_push_each(held, due, terms, settled, 1, held.logged + #buried) and not is_muted
elseif not settled then
  is_ready = open_or_push(held, due, terms, 1)
end
if not settled then
  local length = held.logged + #buried
  if not (is_ready or is_muted) then
    is_ready = fill(held, length, terms, due)
  end
end
save(held, FIELDS)
drop_letter(id)
wake()
return {is_ready and 'ready' or 'added'}
