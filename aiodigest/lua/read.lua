-- read: a page of a timeline's entries: under delivery first, then, without a fence, what came since.
--
-- ARGV[3]  key
-- ARGV[4]  token, or '' to read what nobody need hold
-- ARGV[5]  digest id
-- ARGV[6]  first entry, from 0
-- ARGV[7]  how many at most
-- Returns  'lost', or the entries: fewer than asked for if they are large, but one at least if there is one

local PAGE_BYTES = 262144
local key, token, start, length = ARGV[3], ARGV[4], tonumber(ARGV[6]), tonumber(ARGV[7])
local entries, bytes = {}, 0

local function read(list, from)
  while #entries < length and bytes < PAGE_BYTES do
    local page = call('LRANGE', list, from, from + math.min(32, length - #entries) - 1)
    if #page == 0 then
      return
    end
    for _, entry in ipairs(page) do
      entries[#entries + 1] = entry
      bytes = bytes + #entry
    end
    from = from + #page
  end
end

local opened = call('LLEN', open_of(key))
if token ~= '' then
  local held, problem = load(key)
  if not held then
    return redis.error_reply(problem)
  end
  if fenced(held, token, ARGV[5]) ~= 'held' then
    return 'lost'
  end
  read(open_of(key), start)
else
  if start < opened then
    read(open_of(key), start)
  end
  read(log_of(key), math.max(0, start + #entries - opened))
end
return entries
