-- reading: a page of entries, which may come from several lists.

local PAGE_BYTES = 262144
local entries, bytes = {}, 0

-- Append to the page what a list holds from a place on, until the page has `length` entries or is large: then it has
-- one value too many at the most. How many may still fit is told by those that are there.
local function append_page(list, from, length)
  while #entries < length and bytes < PAGE_BYTES do
    local fit = bytes > 0 and math.ceil((PAGE_BYTES - bytes) * #entries / bytes) or 1
    local found = call('LRANGE', list, from, from + math.min(32, fit, length - #entries) - 1)
    if #found == 0 then
      return
    end
    for _, entry in ipairs(found) do
      if bytes >= PAGE_BYTES then
        return
      end
      entries[#entries + 1] = entry
      bytes = bytes + #entry
    end
    from = from + #found
  end
end
