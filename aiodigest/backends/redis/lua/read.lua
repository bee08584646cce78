-- read: a page of a timeline's entries: under delivery first, then, without a fence, what came since.
--
-- ARGV[3]  key
-- ARGV[4]  token, or '' to read what nobody need hold
-- ARGV[5]  digest id
-- ARGV[6]  first entry, from 0
-- ARGV[7]  how many at most
-- Returns  'lost', or the entries: fewer than asked for if they are large, but one at least if there is one

local key, token, start, length = ARGV[3], ARGV[4], tonumber(ARGV[6]), tonumber(ARGV[7])

local opened = call('LLEN', open_of(key))
if token ~= '' then
  local held, problem = load(key)
  if not held then
    return redis.error_reply(problem)
  end
  if fenced(held, token, ARGV[5]) ~= 'held' then
    return 'lost'
  end
  append_page(open_of(key), start, length)
else
  if start < opened then
    append_page(open_of(key), start, length)
  end
  append_page(log_of(key), math.max(0, start + #entries - opened), length)
end
return entries
