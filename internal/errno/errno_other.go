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

// hostSilent has the numbers for HostSilent. A router that refuses packets may give
// ECONNREFUSED. The numbers in digits are those of Windows, where package syscall has numbers
// of its own invention. No other system uses them.
var hostSilent = []error{
	syscall.ETIMEDOUT, hostDown, syscall.EHOSTUNREACH, syscall.ENETDOWN, syscall.ENETUNREACH, syscall.ECONNREFUSED,
	syscall.Errno(10060), syscall.Errno(10064), syscall.Errno(10065), syscall.Errno(10050), syscall.Errno(10051),
	syscall.Errno(10052), // WSAENETRESET: keep-alive has found nobody.
}
