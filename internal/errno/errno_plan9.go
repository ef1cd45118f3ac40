package errno

import "syscall"

// These are errors with the names and texts of Linux.
const (
	EADDRINUSE    = syscall.ErrorString("address already in use")
	EADDRNOTAVAIL = syscall.ErrorString("cannot assign requested address")
	EAGAIN        = syscall.ErrorString("resource temporarily unavailable")
	ECONNREFUSED  = syscall.ErrorString("connection refused")
	ECONNRESET    = syscall.ErrorString("connection reset by peer")
	EDESTADDRREQ  = syscall.ErrorString("destination address required")
	EFAULT        = syscall.ErrorString("bad address")
	EHOSTUNREACH  = syscall.ErrorString("no route to host")
	EISCONN       = syscall.ErrorString("transport endpoint is already connected")
	EMSGSIZE      = syscall.ErrorString("message too long")
	ENETDOWN      = syscall.ErrorString("network is down")
	ENOBUFS       = syscall.ErrorString("no buffer space available")
	ENODEV        = syscall.ErrorString("no such device")
	ENOMEM        = syscall.ErrorString("cannot allocate memory")
	ENOTCONN      = syscall.ErrorString("transport endpoint is not connected")
	EPIPE         = syscall.ErrorString("broken pipe")
)

// hostSilent has the errors for HostSilent. What Plan 9 says of such a host is not known.
var hostSilent = []error{syscall.ETIMEDOUT}
