package regmem

import "os"

var systemPage = os.Getpagesize()

// DropPages gives back to the system the pages that lie in b as a whole. b is memory of a
// [Buffer] that nobody reads or writes meanwhile; what is read there next is zero or what
// was there. Pages that the system does not take stay as they are.
func DropPages(b []byte) {
	from := int(-addressOf(b) & uintptr(systemPage-1))
	to := len(b) - int((addressOf(b)+uintptr(len(b)))&uintptr(systemPage-1))
	if from < to {
		_ = dropPages(b[from:to])
	}
}
