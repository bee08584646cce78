-- read: a page of a timeline's entries: those under delivery first, then, without a fence, what came since.
--
-- Flags     repeatable
-- Parts     look
-- Commands  HGET HGETALL HLEN HMGET LLEN LRANGE TIME
-- Reply     text | [text...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- ARGV[4]   token (text): or '' to read without holding the lease
-- ARGV[5]   digest_id (text)
-- ARGV[6]   start (int): first entry, from 0
-- ARGV[7]   length (int): how many at most
-- Returns   'lost', or the entries: fewer than asked for if they are large, but one at least if there is one
--
-- Needs     guard clock timelines fencing reading

local key, token, digest_id, start, length = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])

local opened = call('LLEN', opens .. key)
if token ~= '' then
  local held, problem = load(key)
  if not held then
    return redis.error_reply(problem)
  end
  if fenced(held, token, digest_id) ~= 'held' then
    return 'lost'
  end
  append_page(opens .. key, start, length)
else
  if start < opened then
    append_page(opens .. key, start, length)
  end
  append_page(logs .. key, math.max(0, start + #entries - opened), length)
end
return entries
