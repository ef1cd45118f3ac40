// Package errno has the error numbers that Go's syscall package lacks on Plan 9. The system
// calls of Plan 9 fail with texts. On other systems the errors are those of package
// syscall, which errors.Is matches.
package errno

import "errors"

// HostSilent reports whether err says that the host at the other end of a connection has not
// answered for so long that the kernel has given the connection up. If a router or the link
// has told the kernel why, its error has that reason in place of the timeout.
func HostSilent(err error) bool {
	for _, e := range hostSilent {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
