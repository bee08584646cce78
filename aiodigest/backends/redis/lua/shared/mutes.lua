-- mutes: timelines of which nothing is delivered until a time, or until somebody unmutes them.
--
-- A muted timeline that holds records and is not under delivery is in no set of the schedule: its field `due` tells when
-- it was due. `has_mutes` (guard) says whether there may be any, so that where there are none nobody looks for them.

-- a hash: of each muted timeline "until drop", the end (0: none) and 1 if what is added is dropped; and a sorted set: when
-- a claim looks at each again, at the latest when it is over, or when the records end that wait under it
local silences, mutes = tag .. 'silences', tag .. 'mutes'

-- Return until when a timeline is muted (NEVER_MS: without end), and whether what is added is dropped; nil if it is not.
local function mute_of(key)
  local said = has_mutes and call('HGET', silences, key)
  if said then
    local ends, drops = string.match(said, '^(%d+) (%d)$')
    ends = tonumber(ends) or 0 -- another program may have written anything
    return ends > 0 and ends or NEVER_MS, drops == '1'
  end
end

-- Note that a timeline is muted. From then on `place` keeps it out of the schedule.
local function note_mute(key, ends, drops)
  has_mutes = '1'
  call('HSET', layout, 'mutes', 1)
  call('HSET', silences, key, string.format('%.0f %d', ends < NEVER_MS and ends or 0, drops and 1 or 0))
  call('ZADD', mutes, ends, key)
end

-- Write into what a timeline needs that it is muted, or is not any more.
local function need_mutes(held, is_muted)
  local words = {}
  for word in string.gmatch(held.needs or '', '%S+') do
    words[#words + 1] = word ~= 'mute' and word or nil
  end
  words[#words + 1] = is_muted and 'mute' or nil
  held.needs = table.concat(words, ' ')
end

-- Renew the end of what waits under a mute: its ttl counts from the end of the mute, if that has one.
local function touch_muted(held, ends, ttl)
  if ends < NEVER_MS or held['end'] == 0 then
    touch(held, (ends < NEVER_MS and ends - now or 0) + ttl)
  end
end
