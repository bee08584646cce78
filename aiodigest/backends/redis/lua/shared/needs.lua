-- needs: features that timelines need, and that a worker may not know.

-- Return the first feature that a timeline needs and that is not among those `known`: names, separated by spaces.
local function unknown_need(held, known)
  for name in string.gmatch(held.needs or '', '%S+') do
    if not string.find(' ' .. known .. ' ', ' ' .. name .. ' ', 1, true) then
      return name
    end
  end
end
