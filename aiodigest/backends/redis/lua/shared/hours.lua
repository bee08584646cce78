-- hours: the hours in which digests are delivered: their windows, in the server's time, as a process has worked them out.
--
-- Needs    clock

local function parse_hours(text)
  return text ~= '' and cjson.decode(text) or nil
end

-- Return a number from 0 to 1 (exclusive) that is the same for a text everywhere.
local function share_of(text)
  return tonumber(string.sub(redis.sha1hex(text), 1, 8), 16) / 4294967296
end

-- Return a time, or, if the hours are closed then, the next opening and the timeline's share of the spread. What has
-- passed is now. A time that the windows do not tell of stays: a worker looks again before it delivers.
local function within(hours, key, time)
  local windows = hours and hours.windows
  time = windows and math.max(time, now) or time
  local at = time - shift
  for index = 1, windows and at >= hours.since and #windows or 0, 2 do
    local opening, close = windows[index], windows[index + 1]
    if at < opening then
      local spread = math.min(hours.spread, close - opening)
      return opening + shift + (spread > 0 and math.floor(share_of(key) * spread) or 0)
    elseif at < close then
      return time
    end
  end
  return time
end
