//go:build !plan9

package errno

import "syscall"

// These are the error numbers of package syscall.
const (
	EADDRINUSE    = syscall.EADDRINUSE
	EADDRNOTAVAIL = syscall.EADDRNOTAVAIL
	EAGAIN        = syscall.EAGAIN
	ECONNREFUSED  = syscall.ECONNREFUSED
	ECONNRESET    = syscall.ECONNRESET
	EDESTADDRREQ  = syscall.EDESTADDRREQ
	EFAULT        = syscall.EFAULT
	EHOSTUNREACH  = syscall.EHOSTUNREACH
	EISCONN       = syscall.EISCONN
	EMSGSIZE      = syscall.EMSGSIZE
	ENETDOWN      = syscall.ENETDOWN
	ENOBUFS       = syscall.ENOBUFS
	ENODEV        = syscall.ENODEV
	ENOMEM        = syscall.ENOMEM
	ENOTCONN      = syscall.ENOTCONN
	EPIPE         = syscall.EPIPE
)
