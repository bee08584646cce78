-- replay: put a dead letter's records before newer ones, schedule as an add would, and remove the letter.
--
-- ARGV[3]  id of the letter
-- ARGV[4]  "initial increment maximum", ms
-- ARGV[5]  limits: "capacity max_size max_age ttl", ms
-- ARGV[6]  1 if these limits are the timeline's own
-- Returns  {'ready'} or {'added'}; and changes nothing for {'missing'}, {'open', key}, {'full', key, size}, or the text
--          of an error if the timeline is broken

local id, terms = ARGV[3], parse_terms(ARGV[4], ARGV[5], ARGV[6])
local letter, remains = tag .. 'letter:' .. id, tag .. 'remains:' .. id
local facts = call('HMGET', letter, 'key', 'buried')
local key = facts[1]
if not key or (tonumber(facts[2]) or now) <= now - LETTER_TTL then
  return {'missing'}
end
local held, problem = load_all(key)
if not held then
  return problem
end
if held.id or held.opened > 0 then
  return {'open', key}
end
local buried = collect({}, {}, remains, call('LLEN', remains))
local seen = {}
local size = #collect(collect({}, seen, log_of(key), held.logged), seen, remains, #buried)
if size > terms.capacity then
  return {'full', key, size}
end

local due = tonumber(call('ZSCORE', waiting, key))
local is_ready, settled = false, call('ZSCORE', ready, key)
push_front(log_of(key), buried)
held.own = terms.own
touch(held, terms.ttl)
if held.logged == 0 and not held.touched then
  call('PEXPIRE', log_of(key), lifetime(held, terms.ttl))
end
if not settled then
  is_ready = open_or_push(held, due, terms)
  local length = held.logged + #buried
  if terms.max_size > 0 and length >= terms.max_size and not is_ready then
    is_ready = fill(held, length, terms, due)
  end
end
save(held)
call('UNLINK', letter, remains)
call('ZREM', tag .. 'dead', id)
finish()
return {is_ready and 'ready' or 'added'}
